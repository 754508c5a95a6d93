"""What goes wrong in a run, and who did it.

ring.py        what this rank did last: every collective and message, in a few pages of memory that outlive it
entry.py       one operation of a ring, read back
state.py       what one rank says of itself: its ring, its step and phase, its Python stack, its memory
board.py       where ranks leave that for others: files of the launcher, or the store of the process group
heart.py       the thread that leaves it there, and that looks whether this rank waits for too long
diagnose.py    from every rank's state to who is to blame; tell.py: in one paragraph
watch.py       all of that around a run, and autopsy.py from outside, when no rank is left
stragglers.py  who is slow though all steps take equally long
goodput.py     the share of time that became training
injection.py   faults on purpose: what may be asked; inject.py: doing it
stopping.py    SIGTERM: all ranks stop after the same step
host.py        the host's memory; log.py: a line in a run's log from outside the loop
"""
