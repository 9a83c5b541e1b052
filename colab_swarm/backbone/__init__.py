"""A peer that stays online: it saves a run's checkpoints and losses, and shows them on a page. See README.md here."""
