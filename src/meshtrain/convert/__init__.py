"""Models of other programs made into Hugging Face directories: key maps, and readers of their checkpoints."""
