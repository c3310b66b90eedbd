"""What Petiole is measured against, written as its users write it."""
