"""What travels with a model, and what makes transformers know it. Nothing of headwise."""
