"""The steps of the protocol: what each thread of a worker may do next, and what may befall it.

A step is atomic: a script call, or what a thread does between two of them. Threads are not synchronised, so any
step that is possible may come next; a thread or a process that pauses is one whose steps come late. This module
has the threads that run a task; `messages` has the consumer's and the lease keeper's.
"""

from __future__ import annotations

import json
from typing import Any

from petiole.tasks.wire.record.scripts import PublishReply
from tests.protocol.messages import TTL_MS, Messages, process_of, read, replaced
from tests.protocol.scripts import Scripts
from tests.protocol.state import (
    ASKED,
    AT_WORK,
    CHANNEL,
    COMPLETION,
    FINISHED,
    LOG,
    TASK_STATE,
    Job,
    Scenario,
    State,
    Steps,
    Worker,
    blamed,
    value,
)

TOKENS = 2
MAX_ATTEMPTS = 3


class Protocol:
    def __init__(self, run: Scripts, scenario: Scenario) -> None:
        self.run, self.scenario, self.messages = run, scenario, Messages(run)

    def steps(self, s: State) -> Steps:
        for what, after, cost in self._steps(s):
            yield what, _tidy(after)._replace(faults=s.faults - cost), cost

    def _steps(self, s: State) -> Steps:
        yield from self.messages.producer(s)
        yield from self.messages.leases(s)
        yield from self._claim_expires(s)
        for i, w in enumerate(s.workers):
            yield from self.messages.consumer(s, i, w)
            for number, job in w.jobs:
                for thread in (self._intake, self._engine, self._publisher, self._completion, self._standby):
                    yield from thread(s, i, number, job)
            if s.faults:
                yield from self._misfortunes(s, i, w)

    # ------------------------------------------------------------ intake thread

    def _intake(self, s: State, i: int, number: int, job: Job) -> Steps:
        w = s.workers[i]
        if job.at == "queued" and not w.draining:
            args = [TTL_MS, self.model(i), int(self.scenario.room), job.call_name, "", 0, "message", 0, ""]
            task, replies = self.run("begin", s.task, [LOG, TASK_STATE, COMPLETION, ASKED], args)
            begun = s._replace(task=task)
            yield f"{w.channel} begins", begun.put_job(i, number, at="begun", reply=replies[0]), 0
            if s.faults:
                yield f"{w.channel} begins, and the reply is lost", begun, 1
        if job.at == "begun":
            yield f"{w.channel} reads that it has begun", self._start(s, i, number, job), 0

    def model(self, i: int) -> str:
        return f"model {i}" if self.scenario.models else "model"

    def _start(self, s: State, i: int, number: int, job: Job) -> State:
        attempt, deaths, cancel, model, _, done, entries, *_ = job.reply
        if done:
            return s.put_job(i, number, at="replaying", final=json.loads(done), reply=None)
        final = "revoked" if cancel or job.ending else "failure" if deaths >= MAX_ATTEMPTS else ""
        tokens, room = sum(len(json.loads(entry)["token_ids"]) for entry in entries), self.scenario.room
        if tokens and model != self.model(i):
            final = final or "failure"
        progress = {"tokens": tokens, "sent": tokens, "entries": len(entries), "marked": room, "admitted": room}
        return s.put_job(i, number, at="running", reply=None, attempt=attempt, final=final, **progress)

    # ------------------------------------------------------------ engine and text threads

    def _engine(self, s: State, i: int, number: int, job: Job) -> Steps:
        name = s.workers[i].channel
        if job.at != "running" or job.final or job.released or job.over:
            return
        if job.ending:
            yield f"{name} cancels", s.put_job(i, number, final="revoked"), 0
        elif job.handing_back:
            yield f"{name}'s engine hands back", s.put_job(i, number, released=True), 0
        elif not job.prepared:
            yield f"{name} prepares", s.put_job(i, number, prepared=True), 0
        elif not job.admitted:
            yield f"{name} admits", s.put_job(i, number, admitted=True), 0
        elif job.tokens < TOKENS - 1:
            yield f"{name} makes a token", s.put_job(i, number, tokens=job.tokens + 1), 0
        else:
            final = "failure" if self.scenario.kind == "failing" else "success"
            yield f"{name} makes the last token", s.put_job(i, number, tokens=TOKENS, final=final), 0

    # ------------------------------------------------------------ publisher thread

    def _publisher(self, s: State, i: int, number: int, job: Job) -> Steps:
        name = s.workers[i].channel
        if job.at != "running":
            return
        if job.call is not None:
            yield f"{name}'s publisher reads the reply", self._answered(s, i, number, job), 0
            return
        mark, flagged = job.admitted and not job.marked, bool(value(s.task, ASKED, ())) and not job.ending
        if job.sent < job.tokens or job.final or job.released or mark or flagged or self._announces(s, job):
            task, call = self._publish(s, i, job, mark)
            after = s._replace(task=task)
            what = "the end" if job.final else "its stream"
            yield f"{name} writes {what}", after.put_job(i, number, call=call), 0
            if s.faults:
                yield f"{name} writes {what}, and the reply is lost", after, 1

    def _announces(self, s: State, job: Job) -> bool:
        return job.prepared and not job.announced and not job.entries

    def _publish(self, s: State, i: int, job: Job, mark: bool) -> tuple[Any, Any]:
        payload, entries, by = "", job.entries, {"attempt": job.attempt, "model": self.model(i)}
        if job.sent < job.tokens or job.final:
            delta = {**by, "index": job.sent, "token_ids": list(range(job.sent, job.tokens))}
            payload, entries = json.dumps({**delta, "finish_reason": job.final or None}), entries + 1
        words = {"admitted": mark, "last": job.final, "released": job.released and not job.final, "look": True}
        words["prepared"] = self._announces(s, job)
        operations = " ".join(word for word, true in words.items() if true)
        turn = [0, operations, json.dumps(job.final) if job.final else "", json.dumps(by), ""]
        args = [TTL_MS, 1, job.attempt, entries, payload, CHANNEL, *turn]
        task, reply = self.run("publish", s.task, [LOG, TASK_STATE, ASKED], args)
        return task, (reply, job.tokens, entries, operations)

    def _answered(self, s: State, i: int, number: int, job: Job) -> State:
        reply, tokens, entries, operations = job.call
        code, length, ends = reply[1:4] if reply else (0, 0, 0)
        s = s.put_job(i, number, call=None)
        if code == PublishReply.STALE:
            return s.put_job(i, number, at="stale", over=True).post(i, "stand by", number)
        if code == PublishReply.GAP:
            return s.put_job(i, number, sent=ends, entries=length, marked=False, announced=False)
        done = {
            "marked": job.marked or "admitted" in operations,
            "announced": job.announced or "prepared" in operations,
        }
        s = s.put_job(i, number, sent=tokens, entries=entries, **done)
        if "last" in operations:
            return s.put_job(i, number, at="ended")
        if "released" in operations:
            return s.put_job(i, number, at="released", over=True)
        return s.put_job(i, number, ending=True) if code == PublishReply.FLAGGED else s

    # ------------------------------------------------------------ completion threads

    def _completion(self, s: State, i: int, number: int, job: Job) -> Steps:
        """What follows a success is sent before that is stored, and what follows a failure after it."""
        name, links = s.workers[i].channel, self.links(job.final)
        stored = s._replace(stored=s.stored if s.stored == "SUCCESS" else FINISHED.get(job.final, ""))
        called = s._replace(called=s.called + 1)
        match job.at:
            case "replaying" if self.completed(s):
                yield f"{name} finds the task completed", posted(s, i, "leave", number), 0
            case "replaying":
                yield f"{name} finds it not completed", s.put_job(i, number, at="ended"), 0
            case "ended" if self.scenario.kind == "plain":
                yield f"{name} begins to complete", s.put_job(i, number, at="complete"), 0
            case "ended" if s.completion:
                yield f"{name} finds it claimed", posted(s.put_job(i, number, over=True), i, "stand by", number), 0
            case "ended":
                claimed = s._replace(completion="claimed")
                if self.completed(s):  # by one that died before it could record that
                    after = posted(claimed.put_job(i, number, over=True), i, "stand by", number)
                else:
                    after = claimed.put_job(i, number, at="complete", claimed=True)
                yield f"{name} claims the completion", after, 0
                if s.faults:
                    unheard = blamed(_given_up(claimed, i, number))
                    yield f"{name} claims the completion, and the reply is lost", unheard, 1
            case "complete" if job.final == "revoked":
                yield f"{name} completes: revoked", posted(s, i, "announce", number), 0
            case "complete" if links and job.final == "success":
                yield f"{name} sends what is linked", called.put_job(i, number, at="called"), 0
            case "complete" | "called" if job.final == "success":
                after = s if self.scenario.kind == "ignored" else stored
                yield f"{name} stores the result", after.put_job(i, number, at="settle"), 0
            case "complete":
                yield f"{name} stores the failure", stored.put_job(i, number, at="stored"), 0
            case "stored" if links:
                yield f"{name} sends what is linked", called.put_job(i, number, at="settle"), 0
            case "stored" | "settle":
                marked = s if self.scenario.kind == "plain" else s._replace(completion="done")
                yield f"{name} records the completion", posted(marked, i, "settle", number), 0

    def links(self, final: str) -> bool:
        """Whether something is to be sent after this end."""
        after = {"linked": "success", "ignored": "success", "failing": "failure"}
        return after.get(self.scenario.kind) == final

    def completed(self, s: State) -> bool:
        """What a worker can know of it."""
        match self.scenario.kind:
            case "plain":
                return bool(s.stored)
            case "ignored":
                return s.completion == "done"
        return s.completion == "done" or s.stored in ("SUCCESS", "REVOKED")

    def _claim_expires(self, s: State) -> Steps:
        if s.completion == "claimed":
            late = s._replace(completion="")
            if not any(job.claimed for w in s.workers for _, job in w.jobs):
                yield "the claim of a dead worker expires", late, 0
            elif s.faults:
                yield "a claim expires", late._replace(may_call_again=s.may_call_again + 1), 1

    # ------------------------------------------------------------ standing by

    def _standby(self, s: State, i: int, number: int, job: Job) -> Steps:
        w = s.workers[i]
        if job.at != "standing by":
            return
        if not w.holds(job.delivery):
            yield f"{w.channel} stands by without its message", read(s, i, "leave", number), 0
        elif self.completed(s):
            yield f"{w.channel}, standing by, finds the task completed", posted(s, i, "leave", number), 0
        else:
            after = posted(s, i, "requeue", number)
            alive = any(_alive(s, other) for worker in s.workers for _, other in worker.jobs)
            if not alive and s.completion != "claimed":  # a claim expires before the patience ends
                yield f"{w.channel}, standing by, sees no sign of life", after, 0
            elif alive and s.faults:
                yield f"{w.channel}, standing by, sees no sign of life for too long", blamed(after), 1

    # ------------------------------------------------------------ misfortunes

    def _misfortunes(self, s: State, i: int, w: Worker) -> Steps:
        unrecorded = any(self._unrecorded(job) for _, job in w.jobs)
        if w.registered or w.jobs:
            yield f"{w.channel} is killed", blamed(replaced(s, i), unrecorded), 1
        if w.registered and not w.draining:
            for how, closed in (
                ("and gives its messages back", self.messages.close(self.messages.flush(s, i), i)),
                ("and its acknowledgements are lost", self.messages.close(s, i)),
                ("and cannot give its messages back", replaced(s, i)),
            ):
                yield f"{w.channel} is disconnected, {how}", blamed(process_of(w, closed, i)), 1
            yield f"{w.channel} is told to shut down", s.put(i, draining=True), 1
        for number, job in w.jobs:
            if job.at in AT_WORK or (job.at == "running" and not job.over):
                after = blamed(_given_up(s, i, number), self._unrecorded(job))
                yield f"{w.channel} gives up after an error", after, 1

    def _unrecorded(self, job: Job) -> bool:
        """Whether what is linked was sent, and no other worker can know of it."""
        stored = job.at == "settle" and job.final == "success" and self.scenario.kind == "linked"
        return job.at in ("called", "settle") and not stored


def posted(s: State, i: int, what: str, number: int) -> State:
    return s.put_job(i, number, at="posted").post(i, what, number)


def _given_up(s: State, i: int, number: int) -> State:
    s = s.put_job(i, number, at="given up", over=True, claimed=False, call=None)
    return s.post(i, "give up", number)


def _alive(s: State, job: Job) -> bool:
    """Whether this is the newest attempt, or completes the task: its silence does not last."""
    attempt = job.reply[0] if job.at == "begun" else job.attempt
    return not job.over and (job.claimed or (bool(attempt) and str(attempt) == s.field("attempt")))


def _tidy(s: State) -> State:
    """Without the jobs that no thread will touch again."""
    for i, w in enumerate(s.workers):
        mentioned = {number for _, number in w.mailbox}
        kept = tuple((n, job) for n, job in w.jobs if n in mentioned or job.at != "forgotten")
        if len(kept) < len(w.jobs):
            s = s.put(i, jobs=kept)
    return s
