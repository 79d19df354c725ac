/* Fairness on slots = 1: a writer that publishes forever without pause, two readers; does a reader that
   waits always get in? Only the turn rule is modelled here: safety and
   sleeping are modelled in publication.pml, so a wait is a plain wait and a pin is a bit.

   A liveness property under weak fairness: a process that can go on does so at some time. That is what a futex
   wake and a scheduler promise; without it no rule helps.

   The real writer waits until the gate has been open for 2 ms at most; a reader that let such a turn pass (it died,
   is stopped, or gets no processor) has its next one 100 ms later. Here no process dies, so the wait has no bound. */

bit gate, pinned[2], want[2];
bit entered = 0;                    /* ghost: reader 0 is in a section */

active [2] proctype Reader() {
    byte me = _pid;
enter:
    if
    :: gate ->
#ifndef NO_WANT
        want[me] = 1;
#endif
        !gate;                      /* asleep on notify; when the gate opens it still has to be quick enough */
        goto enter
    :: else
    fi;
    pinned[me] = 1;
    if
    :: gate ->                      /* back off: want before the pin goes, or the writer may gate again first */
#if !defined(NO_WANT) && !defined(NO_WANT_ON_BACKOFF)
        want[me] = 1;
#endif
        pinned[me] = 0;
        goto enter
    :: else
    fi;
    want[me] = 0;                   /* pinned: from here on the writer waits for the pin */
    if
    :: me == 0 -> entered = 1; entered = 0
    :: else
    fi;
    pinned[me] = 0;
    goto enter
}

active proctype Writer() {
    do
    :: true ->
#ifndef NO_WANT
        (!want[0] && !want[1]);
#endif
        gate = 1;
        (!pinned[0] && !pinned[1]);
        gate = 0
    od
}

ltl served { []<> entered }
