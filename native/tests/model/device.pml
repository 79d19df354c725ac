/* An arena on a device: copies that are done later, a commit that stands behind them, reads that go on after their
   section and hold their slot until they are done.

   Each of the three is a separate process: the device copies for the writer, and commits behind the copies; each
   reader's stream reads. The writer waits for its commit before it begins the next version. Waiting is a guard here:
   sleeping and waking are looked at in publication.pml, which has the same words.

   `#ifdef`s are wrong steps that must fail; see run.sh. */

#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef READERS
#define READERS 2
#endif
#ifndef PUBLISHES
#define PUBLISHES 3
#endif
#ifndef SECTIONS
#define SECTIONS 2
#endif

#define GATE        4
#define CURRENT(version, slot)  (((version) << 3) | (slot))
#define VERSION(c)  ((c) >> 3)
#define SLOT(c)     ((c) & 3)

byte current = CURRENT(1, 0);
byte leaf_a[SLOTS] = 1, leaf_b[SLOTS] = 1;
byte pin[READERS], held[READERS], acked[READERS] = 1;

/* what the writer has asked the device for: 0 nothing, else slot + 1 */
byte asked = 0;
byte next = 1;                          /* the version under way, or the published one */

/* what a reader has asked its stream for: version of each read under way, by slot; 0 none */
typedef Reads { byte version[SLOTS] };
Reads reads[READERS];

#define UNDER_WAY(me, k)        ((k) < SLOTS && reads[me].version[k] != 0)
#define OLDER(me, s)            ((s) != 0 && UNDER_WAY(me, 0) || (s) != 1 && UNDER_WAY(me, 1) || (s) != 2 && UNDER_WAY(me, 2))

active [READERS] proctype Reader() {
    byte me = _pid, c, s, sections, applied = 1;
enter:
    c = current;
    if :: c & GATE -> c = 0; !(current & GATE) -> goto enter :: else fi;
    pin[me] = c + 1;
    if :: current == c :: else -> pin[me] = 0; c = 0; goto enter fi;
    s = SLOT(c);
    /* one read under way for each slot is enough: a second one would end after the first */
    atomic {
        reads[me].version[s] == 0 -> reads[me].version[s] = VERSION(c);
#if !defined(HELD_LATE) && !defined(NO_HELD)
        held[me] = held[me] | (1 << s)
#endif
    };
    if
    :: VERSION(c) > applied ->
        applied = VERSION(c);
#ifndef ACK_EARLY                       /* reads of an older version hold the ack back */
        !OLDER(me, s);
#endif
        acked[me] = applied
    :: else
    fi;
    pin[me] = 0;
#ifdef HELD_LATE                        /* the writer may look in between */
    atomic { if :: UNDER_WAY(me, s) -> held[me] = held[me] | (1 << s) :: else fi };
#endif
    atomic { c = 0; s = 0; sections++; if :: sections < SECTIONS -> goto enter :: else fi }
}

/* The device's half of a reader. */
#define READ(s) \
    assert(leaf_a[s] == reads[me].version[s]); \
    assert(leaf_b[s] == reads[me].version[s]); \
    atomic { reads[me].version[s] = 0; held[me] = held[me] & ~(1 << (s)) }

active [READERS] proctype Kernels() {
    byte me = _pid - READERS;
end:
    do
    :: UNDER_WAY(me, 0) -> READ(0)
#if SLOTS > 1
    :: UNDER_WAY(me, 1) -> READ(1)
#endif
#if SLOTS > 2
    :: UNDER_WAY(me, 2) -> READ(2)
#endif
    od
}

/* The device's half of the writer. */
active proctype Copies() {
    byte s;
end:
    do
    :: (asked != 0) -> s = asked - 1;
#ifdef COMMIT_EARLY                     /* the version is visible before its copy has ended */
       current = CURRENT(next, s);
#endif
       leaf_a[s] = next;
       leaf_b[s] = next;
       current = CURRENT(next, s);
       asked = 0; s = 0
    od
}

#define IN_USE(k)   (inuse & (1 << (k)))

active proctype Writer() {
    byte slot, row, inuse, version = 1;
publish:
    if :: version > PUBLISHES -> goto done :: else fi;
#ifndef NO_SETTLE                       /* one version at a time is under way */
    (asked == 0);
#endif
#if SLOTS == 1
    current = current | GATE;
#endif
scan:
    inuse = 0; row = 0;
    do
    :: row < READERS ->
        if :: pin[row] != 0 -> inuse = inuse | (1 << SLOT(pin[row] - 1)) :: else fi;
        inuse = inuse | held[row];      /* after the pin: one of the two is seen */
        row++
    :: else -> break
    od;
    row = 0; slot = 0;
#if SLOTS > 1
    inuse = inuse | (1 << SLOT(current));
#endif
    do :: slot < SLOTS && IN_USE(slot) -> slot++ :: else -> break od;
    if :: slot == SLOTS -> slot = 0; goto scan :: else fi;
    atomic { version++; next = version; asked = slot + 1; slot = 0; inuse = 0 };
#ifdef WAIT_ACKS                        /* what the trainer shares beside the arena is overwritten after the acks */
    (asked == 0);
    if
    :: acked[0] >= version ->
        assert(!UNDER_WAY(0, 0) || reads[0].version[0] >= version);
#if SLOTS > 1
        assert(!UNDER_WAY(0, 1) || reads[0].version[1] >= version);
#endif
    :: true                             /* or its deadline comes */
    fi;
#endif
    goto publish;
done:
    skip
}
