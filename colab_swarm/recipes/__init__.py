"""Ready to run: models with their data, the way the papers trained them."""
