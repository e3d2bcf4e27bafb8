"""The dead man's lease of one run, as a pure value. Milliseconds of CLOCK_BOOTTIME, given by the caller.

Rules (protocol.md §6):
1. The deadline counts from admission, not from spawn (G11).
2. A lease counts only as the answer to the nonce that is open; a later nonce voids the earlier one.
3. New deadline = time at which that heartbeat was SENT + duration, never the time of receipt (G13). So no
   delay, buffer, hang or replay extends a run past grant + duration.
4. A passed deadline stays passed: nothing revives a run.
5. While the control plane is absent the supervisor moves the deadline on, a lease at a time, up to send time
   of the last ANSWERED heartbeat + absent_ms. REFUSED ends that at once, and every later renewal.
"""

from dataclasses import dataclass

from interlock.errors import Stale, Untrusted


@dataclass(frozen=True)
class Beat:
    """A heartbeat that was sent: 128-bit nonce and the time of sending."""

    nonce: str
    sent_ms: int


class Leash:
    """Deadline of one attempt. `lease_ms`, `absent_ms` from the signed launch order; not thread-safe."""

    def __init__(self, admitted_ms: int, lease_ms: int, absent_ms: int) -> None:
        self.lease_ms = lease_ms
        self.absent_ms = absent_ms
        self.refused = False
        self._leased_ms = admitted_ms + lease_ms
        self._rolled_ms = 0
        self._answered_ms: int | None = None
        self._open: Beat | None = None

    def open(self, nonce: str, now_ms: int) -> Beat:
        """Open a heartbeat; the earlier one is void from now on."""
        self._open = Beat(nonce, now_ms)
        return self._open

    def accept(self, nonce: str, duration_ms: int, now_ms: int) -> int:
        """Take a lease and return the new deadline.

        Raises Stale (``stale.nonce``, ``stale.lease``) for an answer to anything but the open nonce or
        after the deadline or a refusal, Untrusted (``untrusted.duration``) when it grants more than the
        launch order did.
        """
        if self.refused or now_ms >= self.deadline_ms:
            raise Stale("the lease of this attempt has ended", code="lease", next_step="start a new attempt")
        if self._open is None or nonce != self._open.nonce:
            raise Stale("this lease answers no open heartbeat", code="nonce")
        if duration_ms > self.lease_ms:
            raise Untrusted("a lease may not be longer than the launch order says", code="duration")
        beat, self._open = self._open, None
        self._answered_ms = beat.sent_ms
        self._leased_ms = beat.sent_ms + duration_ms
        self._rolled_ms = 0
        return self.deadline_ms

    @property
    def sent_ms(self) -> int:
        """Return when the open heartbeat was sent; far in the past when none is open."""
        return self._open.sent_ms if self._open else -(1 << 62)

    def refuse(self) -> None:
        """Take a REFUSED: no renewal and no extension any more; the last lease still counts to its end."""
        self.refused = True
        self._open = None
        self._rolled_ms = 0

    def roll(self, now_ms: int) -> int:
        """Bridge an absent control plane and return the deadline.

        In steps of one lease, so that a supervisor that hangs does not leave the whole limit behind, and
        never past the send time of the last answered heartbeat + absent_ms. Nothing to bridge before the
        first answer, after a refusal, or once the deadline has passed.
        """
        near = 0 < self.deadline_ms - now_ms < self.lease_ms // 2
        if near and not self.refused and self._answered_ms is not None:
            self._rolled_ms = min(now_ms + self.lease_ms, self._answered_ms + self.absent_ms)
        return self.deadline_ms

    @property
    def deadline_ms(self) -> int:
        """Return the deadline as it stands, the bridge for an absent control plane included."""
        return max(self._leased_ms, self._rolled_ms)
