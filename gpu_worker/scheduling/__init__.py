"""What is computed next, and what becomes of it: decisions over plain state, torch-free."""
