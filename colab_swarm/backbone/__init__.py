"""The peer that stays: it saves a run's checkpoints and losses, and shows them on a web page. See README.md here."""
