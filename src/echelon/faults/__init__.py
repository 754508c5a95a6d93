"""Failure diagnosis, fault injection and graceful stops.

flight_recorder.py  the last collectives and p2p transfers of a rank, in memory that outlives the process
recorder_entry.py   one operation of the recorder, and the bytes it is stored as
rank_state.py       a snapshot of one rank: recorder, step and phase, Python stack, host memory (host_memory.py)
state_store.py      where ranks publish snapshots: files of the launcher, or the process group's store
heartbeat.py        the thread that publishes snapshots and detects that this rank waits too long
diagnose.py         every rank's snapshot -> the culprit; failure_report.py: the diagnosis as one paragraph
watchdog.py         all of that around a run; post_mortem.py: the launcher's diagnosis when every rank is gone
stragglers.py       the slow rank, although all ranks' steps take equally long
goodput.py          the share of wall time that became training
injection_spec.py   injected faults as text; injector.py: the faults themselves
graceful_stop.py    SIGTERM: all ranks stop after the same step
"""
