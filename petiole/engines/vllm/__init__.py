"""vLLM behind Petiole's pool. Its environment pins other versions than Petiole's, so it is another process.

    worker: preparation, text, ends, limits            child: PETIOLE_VLLM_PYTHON
    parent ──► sequences ──► wording ──► child  ═══════ program ──► AsyncLLM ──► ranks
                                            socket: a message is a line of JSON

parent     `VllmEngine`: starts the child, and has what a worker asks of an engine
sequences  the accepted requests, and what comes back of them
wording    a sequence as a message, in vLLM's words; refuses by name what vLLM lacks
child      the worker's end of the socket: start, messages, signs of life, the end
program    the child's own program. It imports nothing of Petiole's
"""

from petiole.engines.vllm.parent import VllmEngine

__all__ = ["VllmEngine"]
