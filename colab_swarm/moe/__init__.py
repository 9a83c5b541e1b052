"""Decentralized mixture of experts (Learning@home): peers host experts, trainers find them in the DHT."""
