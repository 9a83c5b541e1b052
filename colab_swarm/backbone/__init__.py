"""The peer that stays: keeps a run's checkpoints, collects what its peers tell, and shows it on a web page."""
