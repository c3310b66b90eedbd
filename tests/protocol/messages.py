"""Messages, leases and the consumer's thread: `transport`, `ledger`, `leases` and `shutdown` of `tasks.worker`."""

from __future__ import annotations

from typing import Any

from petiole.tasks.worker.broker.liveness import QUIET_MS
from tests.protocol.scripts import Scripts
from tests.protocol.state import (
    ASKED,
    AT_WORK,
    LEASE,
    MESSAGE,
    OWNERS,
    PRESENT,
    QUEUE,
    SERVER,
    UNACKED,
    Job,
    State,
    Steps,
    Tag,
    Worker,
    blamed,
    fresh,
    value,
    with_key,
)

TTL_MS = 10**9
PREFETCH = 2
RESTORED_A_CALL = 200


class Messages:
    def __init__(self, run: Scripts) -> None:
        self.run = run

    def producer(self, s: State) -> Steps:
        if s.to_send:
            broker = with_key(s.broker, QUEUE, (MESSAGE, *value(s.broker, QUEUE, ())))
            yield "a message is sent", s._replace(broker=broker, to_send=s.to_send - 1), 0
        elif s.to_revoke:
            fields = frozenset({("cancel", "1")})
            after = s._replace(task=with_key(s.task, ASKED, fields), to_revoke=s.to_revoke - 1)
            for i, w in enumerate(s.workers):
                if w.current:
                    after = after.put_job(i, w.current, ending=True)
            yield "the task is revoked", after, 0

    # ------------------------------------------------------------ lease keepers

    def leases(self, s: State) -> Steps:
        alive = {w.owner: i for i, w in enumerate(s.workers)}
        for owner in sorted(s.leases):
            late = s._replace(broker=with_key(s.broker, LEASE + owner, None))
            if owner not in alive:
                yield f"the lease of {owner} expires", late, 0
            elif s.faults:
                yield f"the lease of {owner}, which is paused, expires", blamed(late), 1
        if s.owners - s.leases:
            yield "a sweep gives back the messages of owners without a lease", self._sweep(s), 0
        for owner in sorted(s.owners & s.leases):
            if owner not in alive:
                yield f"a sweep finds that {owner} is absent", self._sweep(s, owner), 0
            elif s.faults:
                yield (
                    f"a sweep takes {owner}, whose connections are reset, for dead",
                    blamed(self._sweep(s, owner)),
                    1,
                )
        for owner, i in alive.items():
            w = s.workers[i]
            if w.registered and not w.lost and owner not in s.leases:
                broker, kept = self.run(
                    "renew", s.broker, [OWNERS, LEASE + owner, SERVER + owner], [owner, TTL_MS, ""]
                )
                after = s._replace(broker=broker)
                yield f"{owner} renews its lease", after if kept else after.put(i, lost=True), 0

    def _sweep(self, s: State, *absent: str) -> State:
        args = [LEASE, UNACKED, RESTORED_A_CALL, "", 1, PRESENT, QUIET_MS, *absent]
        broker, _ = self.run("restore", s.broker, [OWNERS], args)
        return s._replace(broker=broker)

    def _restore(self, s: State, owner: str, *tags: int, forget: bool = True) -> State:
        args = [LEASE, UNACKED, RESTORED_A_CALL, owner, int(forget), *tags]
        broker, _ = self.run("restore", s.broker, [OWNERS], args)
        return s._replace(broker=broker)

    # ------------------------------------------------------------ consumer's thread

    def consumer(self, s: State, i: int, w: Worker) -> Steps:
        name = w.channel
        if s.queued and not w.draining and len(w.delivered) < PREFETCH:
            yield f"{name} takes a message", self._take(s, i), 0
            if s.faults:
                taken = self._take(s, i).put(i, jobs=w.jobs, current=w.current)
                lost = self.close(taken, i) if w.registered else replaced(taken, i)
                yield f"{name} takes a message, and the reply is lost", blamed(process_of(w, lost, i)), 1
        if w.acks or w.rejects:
            yield f"{name} flushes its acknowledgements", self.flush(s, i), 0
        for tag in sorted(w.timers):
            yield f"{name} requeues what was given up", reject(s.put(i, timers=w.timers - {tag}), i, tag), 0
        if w.mailbox:
            (what, number), *rest = w.mailbox
            yield f"{name}'s consumer reads: {what}", read(s.put(i, mailbox=tuple(rest)), i, what, number), 0
        if w.draining:
            job = dict(w.jobs).get(w.current)
            if job and not job.handing_back and job.at != "begun":
                after = s.put_job(i, w.current, handing_back=True, over=job.over or not job.attempt)
                yield f"{name} hands its task back", after, 0
            if (not job or job.over) and not any(job.at in AT_WORK for _, job in w.jobs):
                yield f"{name} closes its channel and ends", self.close(self.flush(s, i), i), 0

    def _take(self, s: State, i: int) -> State:
        if s.workers[i].lost:
            s = _begin_anew(s, i)
        for _ in range(2):
            w = s.workers[i]
            keys = [OWNERS, LEASE + w.owner, UNACKED + w.owner, QUEUE]
            args = [w.owner, TTL_MS, int(not w.registered), w.next_tag, 1, 0, 0, "", "", ""]  # without affinity
            broker, reply = self.run("take", s.broker, keys, args)
            if reply[0] == 1:
                break
            s = _begin_anew(s, i)
        tag = Tag(w.channel, w.next_tag)
        s = s._replace(broker=broker)
        s = s.put(i, registered=True, next_tag=w.next_tag + 1, delivered=w.delivered | {tag})
        if w.current:  # the pool knows the task: its job goes on with the new delivery
            job = w.job(w.current)
            return s.put_job(i, w.current, superseded=(*job.superseded, job.delivery), delivery=tag)
        number = min(set(range(1, 9)) - set(dict(w.jobs)))
        return s.put(
            i, jobs=tuple(sorted([*w.jobs, (number, Job(tag, f"{tag.channel}:{tag.number}"))])), current=number
        )

    def flush(self, s: State, i: int) -> State:
        w = s.workers[i]
        key = UNACKED + w.owner
        left = frozenset(pair for pair in value(s.broker, key, frozenset()) if int(pair[0]) not in w.acks)
        s = s._replace(broker=with_key(s.broker, key, left or None))
        if w.rejects:
            s = self._restore(s, w.owner, *sorted(w.rejects), forget=False)
        return s.put(i, acks=frozenset(), rejects=frozenset())

    def close(self, s: State, i: int) -> State:
        """The channel gives its messages back; another, of this worker or the next, takes its place."""
        w = s.workers[i]
        return replaced(self._restore(s, w.owner) if w.registered else s, i)


def read(s: State, i: int, what: str, number: int) -> State:
    """What another thread has posted to the consumer's."""
    job = s.workers[i].job(number)
    match what:
        case "stand by":
            return s.put_job(i, number, at="standing by")
        case "announce":  # stores, but never over a success, and then acknowledges
            s = s._replace(stored=s.stored or "REVOKED")
            return s.put(i, mailbox=(("settle", number), *s.workers[i].mailbox))
        case "settle" | "leave":
            return _ack(_forget(s, i, number), i, job.delivery)
        case "requeue":
            return reject(_forget(s, i, number), i, job.delivery)
        case "give up":
            s = _forget(s, i, number)
            return s.put(i, timers=s.workers[i].timers | {job.delivery})
    raise AssertionError(what)


def _begin_anew(s: State, i: int) -> State:
    none: frozenset[Any] = frozenset()
    owner = s.workers[i].owner + "'"
    return s.put(i, owner=owner, registered=False, lost=False, delivered=none, acks=none, rejects=none)


def _ack(s: State, i: int, tag: Tag) -> State:
    w = s.workers[i]
    if tag.channel != w.channel:
        return s
    return s.put(i, acks=w.acks | {tag.number}, delivered=w.delivered - {tag})


def reject(s: State, i: int, tag: Tag) -> State:
    w = s.workers[i]
    if tag.channel != w.channel:
        return s
    return s.put(i, rejects=w.rejects | {tag.number}, delivered=w.delivered - {tag})


def _forget(s: State, i: int, number: int) -> State:
    job = s.workers[i].job(number)
    s = s.put_job(i, number, over=True, at="forgotten")
    if s.workers[i].current == number:
        s = s.put(i, current=0)
    for tag in job.superseded:
        s = _ack(s, i, tag)
    return s


def replaced(s: State, i: int) -> State:
    """Another worker, or another channel, has the place of this one, whose messages stay where they are."""
    workers = list(s.workers)
    workers[i] = fresh(i, int(s.workers[i].channel[1:]) + 1)
    return s._replace(workers=tuple(workers))


def process_of(w: Worker, s: State, i: int) -> State:
    """The worker has another channel, and is otherwise as it was."""
    return s.put(i, jobs=w.jobs, current=w.current, mailbox=w.mailbox, timers=w.timers)
