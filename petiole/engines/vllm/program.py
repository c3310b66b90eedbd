"""The program of the child: vLLM's `AsyncLLM` behind a socket.

The interpreter of `PETIOLE_VLLM_PYTHON` runs this file by its path, in an environment that has vLLM and not
Petiole. So it imports nothing of Petiole's. Each message is a line of JSON; `child` says which there are.

The child and all processes that vLLM starts are one group. A guardian, forked before vLLM is imported, kills the
group when the worker's end of the socket is closed, by whatever death, and when the child itself has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import signal
import socket
import sys
from base64 import b64decode
from collections.abc import Coroutine
from io import BytesIO
from itertools import count
from typing import Any

BEAT_S = 1.0
"""Between two signs of life."""
IDLE_BEATS = 30
"""Signs of life for which the ranks of an idle engine are not asked: a question lets each of them spin at its
queue for a second, which would take a processor from whoever else is on this machine."""
STACK_BYTES = 2**28
"""As much as the worker compiles the same grammars on."""
MOST_BYTES = 2**30
"""The largest message: a prompt of millions of tokens, or images."""


def guard(connection: socket.socket) -> None:
    """Fork the guardian."""
    child = os.getpid()
    pidfd = os.pidfd_open(child)
    if os.fork():
        os.close(pidfd)
        return
    ends = select.poll()
    ends.register(connection, 0)  # only the end of the connection: its messages are the child's
    ends.register(pidfd, select.POLLIN)
    ends.poll()
    os.killpg(child, signal.SIGKILL)


class Latest:
    """A stat logger that keeps the scheduler's last figures."""

    figures: dict[str, float] = {}  # noqa: RUF012 - of the process's one engine

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

    def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
        if (stats := scheduler_stats) is not None:
            Latest.figures = {
                "running": stats.num_running_reqs,
                "waiting": stats.num_waiting_reqs,
                "kv_usage": stats.kv_cache_usage,
            }

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, *_: Any) -> None: ...

    def record_admission_rejection(self, *_: Any) -> None: ...


class Server:
    """Serves one connection. Outputs that come together, those of a step, leave as one message."""

    def __init__(self, engine: Any, writer: asyncio.StreamWriter) -> None:
        self.engine, self.writer = engine, writer
        self.outputs: list[dict[str, Any]] = []
        self.running: dict[int, asyncio.Task[None]] = {}

    def send(self, **message: Any) -> None:
        self.writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def put(self, output: dict[str, Any]) -> None:
        if not self.outputs:
            asyncio.get_running_loop().call_soon(self.flush)
        self.outputs.append(output)

    def flush(self) -> None:
        outputs, self.outputs = self.outputs, []
        self.send(outputs=outputs)

    async def beat(self) -> None:
        for beat in count():
            if self.running or beat % IDLE_BEATS == 0:
                try:
                    await self.engine.collective_rpc("check_health")
                except Exception as error:
                    self.dead(error)
            self.send(alive=Latest.figures)
            await asyncio.sleep(BEAT_S)

    def dead(self, error: BaseException) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(error, EngineDeadError) or self.engine.errored:
            self.send(dead=f"{type(error).__name__}: {error}")

    async def generate(self, n: int, asked: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        try:
            options = asked["sampling"]
            if "grammar" in asked:
                options["structured_outputs"] = StructuredOutputsParams(grammar=asked["grammar"])
            if "logit_bias" in options:  # a key of JSON is a string
                options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
            params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **options)
            if "bad" in asked:  # words in our tokens: vLLM would spell them by its own rule
                params._bad_words_token_ids = asked["bad"]
            prompt: dict[str, Any] = {"prompt_token_ids": asked["prompt"]}
            if asked["salt"]:
                prompt["cache_salt"] = asked["salt"]
            if "images" in asked:
                prompt["multi_modal_data"] = {"image": await asyncio.to_thread(pictures, asked["images"])}
            adapter = LoRARequest(*asked["adapter"]) if asked.get("adapter") else None
            if adapter is not None and (why := await self.load(adapter)):
                return self.put({"n": n, "tokens": [], "error": why, "failed": "adapter"})
            sent = False
            async for output in self.engine.generate(
                prompt, params, str(n), lora_request=adapter, priority=asked["priority"]
            ):
                one = output.outputs[0]
                found: dict[str, Any] = {"n": n, "tokens": list(one.token_ids)}
                if one.logprobs is not None:
                    found["logprobs"] = [entries(position) for position in one.logprobs]
                if not sent:
                    sent, found["cached"] = True, output.num_cached_tokens or 0
                    if output.prompt_logprobs is not None:
                        found["prompt"] = [entries(position or {}) for position in output.prompt_logprobs]
                if one.finish_reason is not None:
                    found["end"] = one.finish_reason
                self.put(found)
        except Exception as error:
            self.dead(error)
            cause = error.__cause__ or error
            failed = "request" if isinstance(cause, (VLLMClientError, ValueError, TypeError)) else "engine"
            self.put({"n": n, "tokens": [], "error": f"{type(cause).__name__}: {cause}", "failed": failed})
        return None

    async def load(self, adapter: Any) -> str:
        """Load an adapter; a step that cannot load one ends the engine. Returns why it cannot be loaded, or ""."""
        try:
            await self.engine.add_lora(adapter)
        except Exception as error:
            await self.engine.collective_rpc("check_health")  # raises if it is the engine that has failed
            return f"{type(error).__name__}: {error}"
        return ""

    async def control(self, n: int, pause: bool) -> None:
        """Carry out a pause or its end, and say so."""
        error = ""
        try:
            if pause:
                await self.engine.pause_generation(mode="keep", clear_cache=False)
            else:
                await self.engine.resume_generation()
        except Exception as failure:
            self.dead(failure)
            error = f"{type(failure).__name__}: {failure}"
        self.send(done=n, error=error)

    def carry_out(self, message: dict[str, Any]) -> None:
        n = message["n"]
        match message["do"]:
            case "submit":
                self.begin(n, self.generate(n, message))
            case "cancel":
                if (task := self.running.get(n)) is not None:
                    task.cancel()  # `generate` then aborts the request
            case command:
                self.begin(-n, self.control(n, command == "pause"))

    def begin(self, n: int, work: Coroutine[Any, Any, None]) -> None:
        task = self.running[n] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.running.pop(n, None))


def entries(position: dict[int, Any]) -> list[tuple[int, float, int]]:
    """The log-probabilities at a position: token, log-probability, rank. That of its own token is the first."""
    return [(token, one.logprob, one.rank or 0) for token, one in position.items()]


def pictures(files: list[str]) -> list[Any]:
    """Files in base64 as RGB pictures, turned as EXIF says."""
    from PIL import Image, ImageOps
    from vllm.multimodal.image import convert_image_mode

    try:
        opened = [Image.open(BytesIO(b64decode(file))) for file in files]
        for picture in opened:
            picture.load()
        return [convert_image_mode(ImageOps.exif_transpose(picture), "RGB") for picture in opened]
    except OSError as error:
        raise ValueError(f"an image that cannot be read: {error}") from None


def image_token(config: Any) -> int | None:
    """The token that stands for a picture in a prompt."""
    names = ("boi_token_index", "boi_token_id", "image_token_id", "image_token_index")
    found = [getattr(config, name, None) for name in names]
    return next((token for token in found if token is not None), None)


def started(arguments: list[str]) -> Any:
    """The engine of vLLM's own arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> Any:
            raise ValueError(message)

    parsed = AsyncEngineArgs.add_cli_args(Parser()).parse_args(arguments)
    return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parsed), stat_loggers=[Latest])


def described(engine: Any) -> dict[str, Any]:
    """What the worker must know of the model and its memory."""
    import vllm
    from vllm.platforms import current_platform

    config = engine.vllm_config
    model, cache = config.model_config, config.cache_config
    named = model.try_get_generation_config().get("eos_token_id", getattr(model.hf_config, "eos_token_id", None))
    eos = named if isinstance(named, list) else [named]
    return {
        "version": vllm.__version__,
        "device": current_platform.device_type,
        "eos": sorted({int(token) for token in eos if token is not None}),
        "vocab_size": model.get_vocab_size(),
        "image_token": image_token(model.hf_config) if model.is_multimodal_model else None,
        "max_model_len": model.max_model_len,
        "block_size": cache.block_size,
        "blocks": cache.num_gpu_blocks,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
        "overrides": str(model.hf_overrides or ""),
    }


async def serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MOST_BYTES)
    arguments = json.loads(await reader.readline())["arguments"]
    try:
        engine = started(arguments)
        ready: dict[str, Any] = {"ready": described(engine)}
    except Exception as error:
        ready = {"failed": f"{type(error).__name__}: {error}"}
    writer.write(json.dumps(ready).encode() + b"\n")
    if "failed" in ready:
        await writer.drain()
        return
    server = Server(engine, writer)
    beat = asyncio.ensure_future(server.beat())
    while line := await reader.readline():
        server.carry_out(json.loads(line))
    beat.cancel()
    engine.shutdown()


def on_large_stacks() -> None:
    """Begin again with larger stacks, for threads and ranks, too: the grammar library recurses as deep as rules
    lead to rules."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
        os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    on_large_stacks()
    with socket.socket(fileno=int(sys.argv[1])) as end:
        end.setblocking(False)
        os.set_inheritable(end.fileno(), False)
        guard(end)
        asyncio.run(serve(end))
