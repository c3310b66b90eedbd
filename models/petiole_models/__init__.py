"""The small models that ship with Petiole, a folder each. `resolve_model` in `petiole.gpu_worker` finds them."""
