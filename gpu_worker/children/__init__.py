"""Processes beside this one, for work on what strangers wrote. Such work may crash, or never end.

child   starts a child, asks it, and starts another one after its end
_loop   what runs in a child, a script: it limits itself and answers
_video  a job: reads the file of a video
"""

from petiole.gpu_worker.children.child import Child, ChildEnded

__all__ = ["Child", "ChildEnded"]
