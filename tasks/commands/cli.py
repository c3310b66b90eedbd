"""`petiole`: settings, the demo, and a view of the fleet. A worker is Celery's own: `celery -A tasks worker`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import redis
from celery.states import PENDING, READY_STATES
from kombu.exceptions import OperationalError

import petiole
from petiole.contract.settings.engine import EngineSettings
from petiole.contract.settings.gateway import GatewaySettings
from petiole.contract.settings.urls import redacted
from petiole.tasks import settings
from petiole.tasks.app import worker_side
from petiole.tasks.commands import control as steering, conversation, keys, models, plan, status, usage
from petiole.tasks.commands.batch import command as batch
from petiole.tasks.commands.terminal import error_text, plainly, print_table
from petiole.tasks.errors import InvalidSettings, PetioleError
from petiole.tasks.fleet import control, reports
from petiole.tasks.settings import PREFIX, Settings
from petiole.tasks.streams.api import stream

METRICS_PORT = 9464
MOST_PORT = 65_535
UNKNOWN_AFTER_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    with plainly():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # the benchmarks parse their own options
        return bench(arguments[1:])
    if not arguments:
        parser().print_help()
        return 0
    options = parser().parse_args(arguments)
    for line in [*settings.misspelt(), *settings.ignored_urls(unless_set=True)]:
        print(f"petiole: {line}", file=sys.stderr)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `petiole settings | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except InvalidSettings as error:
        print(f"petiole: {error}", file=sys.stderr)
        return error.exit_code
    except (PetioleError, OperationalError, redis.RedisError, OSError) as error:
        print(f"petiole: {error_text(error)}", file=sys.stderr)
        return 1
    return code


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="petiole", description="LLM inference on a Celery fleet.")
    root.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help)
        added.set_defaults(run=run)
        return added

    show = command("settings", show_settings, "list every setting: its value here, and what it does")
    show.add_argument("--markdown", action="store_true", help="the defaults, as the table in docs/settings.md")
    demo = command("demo", run_demo, "eight prompts at once through an embedded Redis and a real worker")
    demo.add_argument("--plain", action="store_true", help="plain text, as when not on a terminal")
    demo.add_argument("--http", action="store_true", help="a worker behind a gateway, for curl, until stopped")
    demo.add_argument(
        "--vision", action="store_true", help="draw a picture, ask about it, and draw the answers into it"
    )
    demo.add_argument("--search", action="store_true", help="find passages by what they mean")
    demo.add_argument(
        "--save", type=Path, default=Path("petiole-vision.png"), help="with --vision: the picture's file"
    )
    shown = command("status", status.show, "show the workers, live on a terminal")
    shown.add_argument("--json", action="store_true", help="print workers and queues as JSON, and exit")
    shown.add_argument("--once", action="store_true", help="print one table and exit, as when not on a terminal")
    asked = command("doctor", status.doctor, "find what is wrong with Redis, workers, queues and gateways")
    asked.add_argument("--json", action="store_true", help="print the findings as JSON")
    asked.add_argument(
        "--gateway",
        action="append",
        default=[],
        type=_http,
        metavar="URL",
        help="ask this gateway, too (default: that of this machine, if there is one)",
    )
    served = command("models", models.show, "show the models of the last days: names, queues, what they take")
    models.add_options(served)
    read = command("stream", read_stream, "print a task's stream, from its beginning to its end")
    read.add_argument("task_id")
    read.add_argument("--json", action="store_true", help="print every delta as JSON")
    read.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="give up after this many seconds without a delta"
    )
    conversation.add_options(
        command("chat", conversation.run, "a conversation in the terminal, through the queue")
    )
    batch.add_options(command("batch", batch.run, "the rows of a file through the fleet, each exactly once"))
    told = command("task", status.show_task, "tell the story of a task: its attempts, workers, faults and times")
    told.add_argument("task_id")
    told.add_argument("--json", action="store_true", help="print it as JSON")
    again = command("replay", status.replay, "list messages that were put aside, or send them again")
    again.add_argument("task_id", nargs="*", help="whose messages to send again")
    again.add_argument("--all", action="store_true", help="send all of them")
    cancel = command("cancel", cancel_tasks, "cancel tasks, wherever they are")
    cancel.add_argument("task_id", nargs="+")
    for name, run, what in (
        ("pause", steering.pause, "stop engines; workers keep their tasks and take no more"),
        ("resume", steering.resume, "let paused engines go on"),
    ):
        command(name, run, what).add_argument("worker", nargs="*", help="default: all")
    load = command("reload", steering.reload, "replace the weights of running workers; their tasks go on")
    load.add_argument("model", help="a folder on the worker's machine or a hub id, of the same shape")
    load.add_argument("worker", nargs="*", default=[], help="default: all")
    drain = command("drain", steering.drain, "let workers finish their tasks or hand them back, and end")
    drain.add_argument("worker", nargs="+", help="its name, as `petiole status` shows it")
    drain.add_argument("--wait", type=float, metavar="SECONDS", default=0.0, help="wait until they are gone")
    metrics = command("metrics", run_metrics, "serve the fleet's figures for Prometheus, until stopped")
    metrics.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s, all)")
    metrics.add_argument("--port", type=_port, default=METRICS_PORT, help="default: %(default)s; 0: a free one")
    metrics.add_argument(
        "--also",
        action="append",
        default=[],
        choices=("vllm", "gen-ai"),
        help="some figures under vLLM's names, too, or those of OpenTelemetry (gen_ai)",
    )
    serve = command("serve", run_gateway, "serve OpenAI's interface over HTTP, until stopped")
    serve.add_argument("--host", help="address to listen on (default: PETIOLE_GATEWAY_HOST)")
    serve.add_argument("--port", type=_port, help="default: PETIOLE_GATEWAY_PORT; 0: a free one")
    everything = command("up", run_up, "Redis, workers of these models, the gateway and its page, until stopped")
    everything.add_argument("model", nargs="+", help="a folder, a hub id, or a model that ships with the project")
    everything.add_argument("--host", help="address to listen on (default: PETIOLE_GATEWAY_HOST)")
    everything.add_argument("--port", type=_port, help="default: PETIOLE_GATEWAY_PORT; 0: a free one")
    keys.add_options(command("keys", None, "make, list and revoke the keys of the gateway"))
    usage.add_options(command("usage", usage.show, "show what each tenant has used"))
    plan.add_options(command("plan", plan.show, "what a model needs, and what a machine serves of it"))
    trace = command("trace", run_trace, "run the model here for a moment, and write a timeline of its steps")
    trace.add_argument("file", help="Chrome JSON, for ui.perfetto.dev or chrome://tracing")
    command("bench", None, "run benchmarks: see `petiole bench --help`")
    return root


def _http(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must be a URL of http or https, got {text!r}")
    return text


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) <= MOST_PORT):
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {MOST_PORT}, got {text!r}")
    return int(text)


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        version = reports.version()
        print(f"petiole {version}" if version else "petiole, not installed")
        parser.exit()


def show_settings(options: argparse.Namespace) -> int:
    if options.markdown:
        print(settings_page())
        return 0
    current = settings.settings()
    rows = [
        (PREFIX + name.upper(), _shown(getattr(current, name)), "" if _is_default(current, name) else "set", what)
        for name, what in _described()
    ]
    print_table(("setting", "value", "", "what it does"), rows)
    return 0


def settings_page() -> str:
    """The table in docs/settings.md."""
    lines = ["| variable | default | |", "|---|---|---|"]
    for name, what in _described():
        default = _shown(Settings.model_fields[name].default)
        lines.append(f"| `{PREFIX}{name.upper()}` | {f'`{default}`' if default else ''} | {what} |")
    return "\n".join(lines)


def _described() -> list[tuple[str, str]]:
    """The settings' names and descriptions, the gateway's and the engine's last."""
    theirs = [*GatewaySettings.model_fields, *(one.name for one in fields(EngineSettings))]
    names = [*(name for name in Settings.model_fields if name not in theirs), *theirs]
    return [(name, Settings.model_fields[name].description or "") for name in names]


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else redacted(str(value))


def _is_default(current: Settings, name: str) -> bool:
    return bool(getattr(current, name) == Settings.model_fields[name].default)


def read_stream(options: argparse.Namespace) -> int:
    silence = threading.Timer(UNKNOWN_AFTER_S, _warn_if_unknown, [options.task_id])
    silence.daemon = True
    silence.start()
    try:
        with stream(options.task_id, timeout_s=options.timeout) as deltas:
            for delta in deltas:
                silence.cancel()
                found = "".join(f"{json.dumps(item)}\n" for item in [*delta.points, *delta.objects])
                print(delta.model_dump_json() + "\n" if options.json else delta.text + found, end="", flush=True)
    finally:
        silence.cancel()
    if not options.json:
        print()
    return 0


def _warn_if_unknown(task_id: str) -> None:
    with contextlib.suppress(redis.RedisError, OSError):
        if control.state_of(task_id) == PENDING:
            print(f"petiole: {task_id} is not known to any worker yet; waiting", file=sys.stderr)


def cancel_tasks(options: argparse.Namespace) -> int:
    all_known = True
    for task_id in options.task_id:
        state = control.state_of(task_id)
        if state in READY_STATES:
            print(f"{task_id}: has ended ({state})")
            continue
        control.cancel(task_id)
        all_known &= state != PENDING
        unknown = "not known to any worker; cancelled if it waits in a queue"
        print(f"{task_id}: {unknown if state == PENDING else 'cancelled'}")
    return 0 if all_known else 1


def run_demo(options: argparse.Namespace) -> int:
    if options.http:
        from petiole.tasks.commands import gateway

        return gateway.show()
    if options.vision:
        from petiole.tasks.commands.demos import vision

        return vision.main(options.save)
    if options.search:
        from petiole.tasks.commands.demos import search

        return search.main()
    from petiole.tasks.commands.demos import streams

    return streams.main(plain=options.plain)


def run_metrics(options: argparse.Namespace) -> int:
    try:
        from petiole.tasks.fleet import exporter
        from petiole.tasks.fleet.metrics import ALIASES
    except ImportError as error:
        print(f"petiole: metrics need 'petiole[metrics]': {error}", file=sys.stderr)
        return 1
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    host = options.host
    settings.settings()  # a wrong one ends this command, not each scrape
    port = exporter.serve(host, options.port, [ALIASES[name] for name in dict.fromkeys(options.also)])
    print(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/metrics", flush=True)
    over.wait()
    return 0


def run_gateway(options: argparse.Namespace) -> int:
    from petiole.tasks.commands import gateway

    return gateway.serve(options.host, options.port)


def run_up(options: argparse.Namespace) -> int:
    from petiole.tasks.commands import gateway

    return gateway.up(options.model, options.host, options.port)


def run_trace(options: argparse.Namespace) -> int:
    try:
        trace = worker_side.load(worker_side.TRACE)
    except ImportError as error:
        print(f"petiole: a trace needs 'petiole[worker]': {error}", file=sys.stderr)
        return 1
    try:
        trace(options.file)
    except (OSError, ValueError) as error:  # about the model, a setting or the file
        print(f"petiole: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def bench(arguments: list[str]) -> int:
    """Run the benchmarks, which only the repository has. A module `bench` of the user's own does not count."""
    checkout = Path(petiole.__file__).resolve().parents[1]
    if not (checkout / "bench" / "__main__.py").is_file() or not (checkout / "pyproject.toml").is_file():
        print("petiole: the benchmarks need a checkout of Petiole's repository: run it there", file=sys.stderr)
        return 1
    sys.path.insert(0, str(checkout))
    try:
        from bench.__main__ import main as run
    except ImportError as error:
        print(f"petiole: benchmarks need 'petiole[bench]': {error}", file=sys.stderr)
        return 1
    code: int = run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
