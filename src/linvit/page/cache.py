"""What is kept in memory, for how long there is room."""

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Slot(Generic[T]):
    """A value that is there, or is being made by whoever holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: T | None = None
        self.bytes = 0


class Cache(Generic[T]):
    """Values by key, for several threads. Each is made once, whoever waits for it; when all together are larger than
    `room` bytes, those go that were used longest ago."""

    def __init__(self, room: int, weigh: Callable[[T], int]) -> None:
        self.room, self.weigh = room, weigh
        self.slots: OrderedDict[Hashable, Slot[T]] = OrderedDict()
        self.lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value, made now if it is not there. An error in making it leaves nothing behind."""
        with self.lock:
            slot = self.slots.setdefault(key, Slot())
            self.slots.move_to_end(key)
        with slot.lock:
            if slot.value is None:
                try:
                    slot.value = make()
                    slot.bytes = self.weigh(slot.value)
                except BaseException:
                    with self.lock:
                        if self.slots.get(key) is slot:
                            del self.slots[key]
                    raise
                self.make_room(key)
            return slot.value

    def find(self, key: Hashable) -> T | None:
        """The value, if it is still there."""
        with self.lock:
            slot = self.slots.get(key)
            if slot is None or slot.value is None:
                return None
            self.slots.move_to_end(key)
            return slot.value

    def keep(self, value: T) -> str:
        """Keep a value under a key that nobody guesses."""
        key = secrets.token_urlsafe(16)
        self.get(key, lambda: value)
        return key

    def make_room(self, newest: Hashable) -> None:
        with self.lock:
            total = sum(slot.bytes for slot in self.slots.values())
            for key in list(self.slots):
                slot = self.slots[key]
                if total <= self.room:
                    break
                if key != newest and slot.value is not None:
                    total -= slot.bytes
                    del self.slots[key]
