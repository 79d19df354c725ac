"""The calls that faults.py lets fail, in groups that run side by side. A new one joins a group."""

from __future__ import annotations

from .commands import Gc, List
from .publisher import (
    ClosePublisher,
    Create,
    CreateInThePlaceOfAnother,
    Publish,
    PublishInSlots,
    PublishPastADeadReader,
    PublishPastAPin,
    Update,
    WaitForALateReader,
    WaitForReader,
)
from .schemes import Receive, ReceiveFromAnArena, Send, SendThroughAnArena
from .subscriber import (
    Attach,
    AttachToAFullTable,
    Bind,
    CallABoundModule,
    Detach,
    Read,
    ReadInSlots,
    ReadOptimistically,
    ReadWhileTheWriterWrites,
    Refresh,
    Snapshot,
    WaitForAVersion,
)

GROUPS = {
    "publisher": [Create, CreateInThePlaceOfAnother, ClosePublisher, Publish, PublishInSlots, Update],
    "publisher with readers": [
        PublishPastAPin,
        WaitForALateReader,
        WaitForReader,
        PublishPastADeadReader,
    ],
    "subscriber attaches": [Attach, Detach, AttachToAFullTable, Bind],
    "subscriber reads": [
        Read,
        ReadInSlots,
        ReadOptimistically,
        Refresh,
        Snapshot,
        CallABoundModule,
        ReadWhileTheWriterWrites,
        WaitForAVersion,
    ],
    "sender": [Send, SendThroughAnArena],
    "receiver": [Receive, ReceiveFromAnArena],
    "commands": [List, Gc],
}
