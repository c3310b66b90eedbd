"""Settings, each with type, limits, default and meaning. `tasks.settings` reads them from the environment.

engine   `EngineConfig`, and the switches of a process
gateway  those of `petiole serve`
urls     the forms of broker and Redis URLs; passwords that are not shown
"""
