"""The skills of Moondream 2: how each asks, which tokens may answer, and what the answer is.

query    a question, about a picture or not; with reasoning if asked
caption  a picture in words
point    where things are
detect   boxes around things
finding  what point and detect share
options  the checks of a call's options
"""

from petiole.gpu_worker.models.moondream.skills import caption, detect, point, query

SKILLS = {"query": query.ask, "caption": caption.ask, "point": point.ask, "detect": detect.ask}
"""By name: (options, the model's configuration, how many images, codec) -> Asked. Each raises InvalidRequest."""
