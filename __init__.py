"""dewconv: decoder checkpoints between Hugging Face safetensors and JAX parameter banks."""
