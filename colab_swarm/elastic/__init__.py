"""Elastic consistency: peers that go on before all gradients are there, inside a bound that is measured."""
