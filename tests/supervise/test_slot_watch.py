from pathlib import Path

from llamarack.supervise.journal import Journal
from llamarack.supervise.slot_watch import SUSTAINED_S, SlotWatch


def test_one_event_while_too_few_slots_stay_idle_and_one_when_there_are_enough(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    idle = {"m": 3, "n": 9}
    watch = SlotWatch(2, journal, lambda: idle)
    watch.look(0)
    idle["m"] = 1
    watch.look(1)
    idle["m"] = 2  # a moment only
    watch.look(2)
    assert not journal.recent
    idle["m"] = 0
    for at in range(3, 20):
        watch.look(at)
    assert [(entry.kind, entry.severity) for entry in journal.recent] == [("slots_low", "warning")]
    assert "m: 0 slots are idle, supervise.slots_idle_min is 2" in journal.recent[0].message
    assert journal.recent[0].data["idle"] == 0
    assert SUSTAINED_S > 1
    idle["m"] = 2
    watch.look(20)
    watch.look(21)
    assert [entry.kind for entry in journal.recent] == ["slots_low", "slots_idle_again"]
