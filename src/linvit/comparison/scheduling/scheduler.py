"""The one scheduler: it claims jobs, sends them to a place, hears what becomes of them and writes that down.

The store is the queue: several schedulers, on several machines, may work on one at the same time. Runs come first;
speeds when those that are left are other machines', one at a time on each slot and with nothing beside them. A worker
goes on with the candidate it did before, whose code is compiled. A job whose worker dies is sent again, three times at
most. A job that fails by itself is recorded and stops nobody; a full disk stops all, and is nobody's failure. What
others work on is waited for, in case they die.

`watch(job, record)` hears what happens. Records have a kind: `start`, then those of the training (`train`, `eval`,
`note`), and `done`, `failed` with its error, or `lost` when the worker died and the job goes to another.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from linvit.comparison.description.job import Job
from linvit.comparison.scheduling.places.place import Place, Record, TimingSlot
from linvit.comparison.scheduling.store import Claim, ClaimLost, Store, hardware_for
from linvit.errors import LinvitError, Unwritable

Watch = Callable[[Job, Record], None]
Hardware = Callable[[Job], list[str]]
POLL = 2.0  # seconds between two looks at what others work on
TRIES = 3  # of a job whose worker dies


def run(jobs: Sequence[Job], store: Store, place: Place, *, watch: Watch, retry: bool = False) -> "Summary":
    """Do the jobs in a place; how they stand in the end."""
    if not jobs:
        return Summary()
    store.clear()
    with place.opened(store, jobs):
        board = Board(jobs, store, retry=retry, hardware=place.hardware)
        Scheduler(board, place, watch).run()
        return board.summary()


@dataclass(frozen=True)
class Summary:
    """How the jobs stand at the end: keys of those finished here, finished before or elsewhere, failed, and missing
    because what they need failed."""

    done: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.failed and not self.missing

    @property
    def anything(self) -> bool:
        """Whether there is something to report."""
        return bool(self.done or self.earlier or self.failed)


class Board:
    """The jobs of one command, and how each stands by what the store holds. A job that failed before is left alone
    unless `retry`. A speed is finished when it is there for each kind of `hardware` that is to time it, of this machine
    unless told."""

    def __init__(
        self, jobs: Iterable[Job], store: Store, *, retry: bool = False, hardware: Hardware | None = None
    ) -> None:
        self.jobs, self.store, self.hardware = list(jobs), store, hardware or (lambda job: [hardware_for(job)])
        self.by_key = {job.key: job for job in self.jobs}
        self.seen: set[tuple[str, str]] = set()
        self.earlier = {job.key for job in self.jobs if self.finished(job)}
        self.forgiven = {job.key: len(store.failures(job.key)) if retry else 0 for job in self.jobs}

    def finished(self, job: Job) -> bool:
        return all(self.there(job, kind) for kind in (self.hardware(job) if job.kind == "speed" else [""]))

    def there(self, job: Job, hardware: str) -> bool:
        """Whether one result file is there, which it then stays."""
        if (job.key, hardware) not in self.seen and self.store.finished(job, hardware):
            self.seen.add((job.key, hardware))
        return (job.key, hardware) in self.seen

    def failed(self, job: Job) -> bool:
        return not self.finished(job) and len(self.store.failures(job.key)) > self.forgiven[job.key]

    def blocked(self, job: Job) -> str | None:
        """Whether a job lacks what it needs: for good ("failed"), or for now ("waiting")."""
        for key in job.needs:
            other = self.by_key.get(key)
            if (other is None and not self.store.trained(key)) or (other is not None and self.failed(other)):
                return "failed"
            if other is not None and not self.finished(other):
                return "waiting"
        return None

    def open(self) -> list[Job]:
        """What is left to do, or to wait for."""
        return [t for t in self.jobs if not self.finished(t) and not self.failed(t) and self.blocked(t) != "failed"]

    def summary(self) -> Summary:
        groups: dict[str, list[str]] = {"done": [], "earlier": [], "failed": [], "missing": []}
        for key, job in self.by_key.items():
            ended = "done" if self.finished(job) else "failed" if self.failed(job) else "missing"
            groups["earlier" if key in self.earlier else ended].append(key)
        return Summary(**{name: tuple(keys) for name, keys in groups.items()})


@dataclass(eq=False)
class Hand:
    """A worker of ours: for runs, or on the slot where it times one speed after another."""

    worker: Any
    slot: TimingSlot | None
    affinity: str = ""  # whose compiled steps it has
    busy: bool = False


@dataclass(frozen=True)
class Flight:
    """A job that is out, the claim on it, and who does it."""

    job: Job
    claim: Claim
    hand: Hand

    @property
    def name(self) -> str:
        return self.claim.path.name


class Scheduler:
    """Keeps a place busy until nothing is left."""

    def __init__(self, board: Board, place: Place, watch: Watch) -> None:
        self.board, self.place, self.watch, self.store = board, place, watch, board.store
        self.hands: list[Hand] = []
        self.flying: dict[str, Flight] = {}
        self.ended: set[str] = set()  # names of what came to an end here: nothing is done twice
        self.losses: Counter[str] = Counter()
        self.settled = self.stillborn = 0

    def run(self) -> None:
        try:
            while True:
                left = self.fill()
                if not self.flying and not (left and self.place.patient):
                    return
                self.listen()
        finally:
            for flight in list(self.flying.values()):
                self.drop(flight)
            for hand in list(self.hands):
                with suppress(Exception):  # the place itself may be gone
                    self.dismiss(hand)

    def listen(self) -> None:
        """Hear the workers until a job has ended, or it is time to look at the store again."""
        if not self.flying:
            time.sleep(POLL)
        until, settled = time.monotonic() + POLL, self.settled
        while self.flying and settled == self.settled and time.monotonic() < until:
            with suppress(ClaimLost):
                self.place.poll(self.hear)
            for flight in [flight for flight in self.flying.values() if flight.claim.lost]:
                self.drop(flight)  # this process slept, and another took over

    def fill(self) -> bool:
        """Send as much as the place takes; whether anything is left to do or to wait for."""
        runs = [job for job in self.board.open() if job.kind != "speed" and job.key not in self.ended]
        if not any(hand.slot and hand.busy for hand in self.hands):
            self.fill_with_runs([job for job in runs if job.key not in self.flying])
            self.dismiss_idle(of_runs=True)
        speeds = self.speeds()
        others = all(self.store.claimed(job) and not self.store.claimed_here(job) for job in runs)
        if not any(hand.slot is None for hand in self.hands) and others:
            for slot in dict.fromkeys(slot for slot, _ in speeds):
                hand = next((hand for hand in self.hands if hand.slot == slot), None)
                if hand is None or not hand.busy:
                    any(self.send(job, hand, slot) for other, job in speeds if other == slot)
        self.dismiss_idle()
        return bool(runs or speeds)

    def fill_with_runs(self, runs: list[Job]) -> None:
        """Give each free hand, also new ones, the run that suits it best: of the candidate it did before, else of one
        that no other hand does. What turns out to be another's is no longer ready."""
        ready = [job for job in runs if self.board.blocked(job) is None]
        hands: list[Hand | None] = [hand for hand in self.hands if hand.slot is None and not hand.busy]
        hands += [None] * (self.place.capacity() - sum(hand.slot is None for hand in self.hands) if ready else 0)
        for hand in hands:
            others, mine = {other.affinity for other in self.hands}, hand.affinity if hand else ""
            for job in sorted(ready, key=lambda job: (job.affinity != mine, job.affinity in others)):
                ready.remove(job)
                if self.send(job, hand, None):
                    break

    def speeds(self) -> list[tuple[TimingSlot, Job]]:
        """What is still to be timed, and where: every candidate once on each kind of hardware."""
        jobs = [job for job in self.board.jobs if job.kind == "speed" and not self.board.failed(job)]
        return [
            (slot, job)
            for slot in (self.place.timing_slots() if jobs else ())
            for job in jobs
            if not self.board.there(job, slot.hardware(job))
            and self.store.claim_path(job, slot.hardware(job)).name not in self.ended
        ]

    def dismiss_idle(self, of_runs: bool = False) -> None:
        for hand in [hand for hand in self.hands if not hand.busy and (hand.slot is None or not of_runs)]:
            self.dismiss(hand)

    def send(self, job: Job, hand: Hand | None, slot: TimingSlot | None) -> bool:
        """Claim a job and send it; False where another has it."""
        claim = self.store.claim(job, slot.hardware(job) if slot else None)
        if claim is None:
            return False
        try:
            if hand is None:
                hand = Hand(self.place.hire(job, slot), slot)
                self.hands.append(hand)
            hand.busy, hand.affinity = True, job.affinity
            flight = Flight(job, claim, hand)
            self.flying[flight.name] = flight
            self.place.send(hand.worker, job, flight.name, shared=1 if slot else self.place.shared)
        except BaseException:
            claim.release()
            raise
        return True

    def hear(self, name: str, record: Record) -> None:
        """What a worker says of its job: how it goes, or how it ended. That is written down, and only then is the job
        let go."""
        flight = self.flying.get(name)
        if flight is None:  # it was given up meanwhile
            return
        flight.claim.check()
        if record["kind"] not in ENDS:
            self.stillborn = 0
            self.watch(flight.job, record)
            return
        ENDS[record["kind"]](self, flight, record)
        self.settled += 1
        del self.flying[name]
        flight.claim.release()
        flight.hand.busy = False
        if record.get("spoilt"):
            self.dismiss(flight.hand, kill=True)

    def keep(self, flight: Flight, record: Record) -> None:
        self.store.write(flight.job, replace(record["result"], command=flight.job.command))
        self.ended.add(flight.name)
        self.watch(flight.job, {"kind": "done"})

    def fail(self, flight: Flight, record: Record) -> None:
        failure = self.store.add_failure(replace(record["failure"], command=flight.job.command))
        self.ended.add(flight.name)
        self.watch(flight.job, {"kind": "failed", "error": failure.error})

    def lose(self, flight: Flight, record: Record) -> None:
        """Let a job whose worker died be sent again, unless that happened too often."""
        reason = record["text"]
        if not record["begun"]:
            self.stillborn += 1
            if self.stillborn >= TRIES:
                raise LinvitError(f"workers end before they begin ({reason}): try --engine local")
            return
        self.losses[flight.name] += 1
        count = self.losses[flight.name]
        self.watch(flight.job, {"kind": "lost", "text": reason, "attempt": count})
        if count >= TRIES:
            failure = self.store.failure(flight.job, f"its worker was lost {count} times: {reason}")
            self.fail(flight, {"failure": failure})

    def stop(self, flight: Flight, record: Record) -> None:
        """End all work, for a reason that is no job's own."""
        raise Unwritable(record["text"])

    def drop(self, flight: Flight) -> None:
        """Give up a job that is out, and its claim: whoever comes next goes on from its checkpoints."""
        del self.flying[flight.name]
        with suppress(Exception):  # the place itself may be gone
            self.dismiss(flight.hand, kill=True)
        flight.claim.release()

    def dismiss(self, hand: Hand, *, kill: bool = False) -> None:
        """Let a worker go, and with it what it holds of the device."""
        self.hands.remove(hand)
        self.place.dismiss(hand.worker, kill=kill)


ENDS = {"result": Scheduler.keep, "failure": Scheduler.fail, "lost": Scheduler.lose, "stopped": Scheduler.stop}
