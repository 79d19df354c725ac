/* Publish, pin, wake, reap, take over, abort, poison and crash.

   slots = 1: the writer shuts the gate, waits for the pins to go, writes in place.
   slots 2, 3: the writer takes a slot that is neither current nor pinned; the gate is never shut.
   The reader is the same for both. Each `#ifdef` below is one mutation, one wrong step that must fail;
   without a flag this is the design. run.sh says which flag is caught in which configuration.

   Errors: an assertion (a section saw something else than its version, or a slot was written under a
   section), or an invalid end state (a process sleeps and no other will ever wake it).

   Every STEP holds one access to a shared word, and after it only the decision that follows from it:
   a stored state is then a point between two shared accesses, and there are as few as can be. */
#include "words.pml"

/* Section 5, "Wake of a waiting writer", the reader's half: after every store that may let the writer go
   on (unpin, back-off, clearing a pin that was taken over). `then` is where the reader goes on. */
#define WAKE_WRITER(then) \
    STEP(if :: !waiting -> then :: else fi); \
    STEP(reply++); \
    STEP(writer_asleep = 0; then)

#define FORGET        n = 0; c = 0; s = 0; version = 0
#define NEXT_SECTION  sections++; if :: sections < SECTIONS -> goto enter :: else -> goto leave fi
#define NEXT_READER_ROW row++; if :: row < ROWS -> goto join :: else -> goto gone fi    /* ReaderTableFull */

active [READERS] proctype Reader() {
    byte me = _pid;
    byte row, o, n, c, s, version, sections;
    bit seen_waiting;

#if ROWS == READERS     /* each reader has its own row; joining is looked at with fewer rows than readers */
    STEP(row = me; owner[row] = OWNER(me); goto enter);
#endif
join:                   /* claim a free row, or take over the row of a dead reader, by one CAS on owner */
    STEP(o = owner[row]; if :: o == 0 || DEAD(o) :: else -> o = 0; NEXT_READER_ROW fi);
    STEP(if
         :: owner[row] == o -> owner[row] = OWNER(me); if :: o == 0 -> goto enter :: else fi
         :: else -> o = 0; NEXT_READER_ROW
         fi);
    o = 0;
#ifndef TAKEOVER_KEEPS_PIN          /* the dead reader's pin stays until we pin ourselves */
    STEP(pin[row] = 0);
#ifndef TAKEOVER_NOWAKE             /* the writer may be waiting for exactly this pin */
    WAKE_WRITER(goto enter);
#endif
#endif

enter:
#ifndef NOTIFY_LATE                 /* notify first: a bump after this load makes the sleep return at once */
    STEP(n = notify);
#endif
    STEP(c = current; version = VERSION(c)
#ifndef NOTIFY_LATE
         ; if :: c & GATE -> goto shut :: else fi
#endif
        );
#ifdef NOTIFY_LATE
    STEP(n = notify; if :: c & GATE -> goto shut :: else fi);
#endif
#ifdef POISON_OPENS_GATE            /* this look is too early: the poisoning may come before our reload */
    STEP(if :: poisoned -> FORGET; goto leave :: else fi);
#endif
    STEP(pin[row] = c + 1; n = 0);
#ifdef NO_RELOAD
    goto section;
#endif
    STEP(if :: current == c -> goto section :: else fi);
    STEP(pin[row] = 0; FORGET);     /* back off */
#ifdef BACKOFF_NOWAKE
    goto enter;
#endif
    WAKE_WRITER(goto enter);

shut:                               /* the gate is shut: writer dead, arena poisoned, or wait for notify */
#ifdef LIVENESS_LATE                /* a state read before death was established need not be the last one */
    STEP(s = seq[0]);
#endif
    STEP(if :: dead[WRITER] -> goto writer_died :: else fi);
    STEP(if :: poisoned -> FORGET; goto leave :: else fi);
    STEP(if :: notify == n -> reader_asleep[me] = 1 :: else -> FORGET; goto enter fi);
#ifdef NO_SLICE                     /* a sleeper does not look at the pidfd */
    STEP(reader_asleep[me] == 0 -> FORGET; goto enter);
#endif
    STEP((reader_asleep[me] == 0 || dead[WRITER]) -> reader_asleep[me] = 0; FORGET; goto enter);

writer_died:                        /* final now. Odd: Poisoned, never served. Even: intact, as version seq/2 */
#ifndef LIVENESS_LATE
    STEP(s = seq[0]);
#endif
    atomic { if
#ifndef SERVE_ODD
    :: s & 1 -> FORGET; goto leave
#endif
    :: else ->
#ifndef SERVE_CURRENT_VERSION       /* the writer may have died between seq and current */
        version = s / 2;
#endif
        s = 0; n = 0
    fi };

section:                            /* two loads of the body, so that a write between them shows */
    STEP(reading[me] = SLOT(c) + 1; assert(leaf_a[SLOT(c)] == version));
    STEP(assert(leaf_b[SLOT(c)] == want_b[version]); FORGET);
#ifdef WAKE_CHECK_EARLY             /* waiting is loaded before the pin is dropped */
    STEP(seen_waiting = waiting);
    STEP(reading[me] = 0; pin[row] = 0; if :: !seen_waiting -> NEXT_SECTION :: else fi);
    seen_waiting = 0;
    STEP(reply++);
    STEP(writer_asleep = 0; NEXT_SECTION);
#endif
    STEP(reading[me] = 0; pin[row] = 0);
#ifdef UNPIN_NOWAKE
    NEXT_SECTION;
#endif
    WAKE_WRITER(NEXT_SECTION);

leave:
    STEP(owner[row] = 0);           /* a clean leaver holds no pin */
gone:
    atomic { FORGET; row = 0; o = 0; sections = 0; seen_waiting = 0 }
}

#if OPTIMISTIC
/* An optimistic section: starts only on the exact sequence word of the version that it will report. One
   attempt, at any moment: a second one is the same as a later first one. */
active proctype Optimist() {
    byte c, before;
    bool right;
    c = current;
    atomic {
        before = seq[SLOT(c)];
        if
#ifdef PARITY_ONLY                  /* even, but of another version once the slot has been used again */
        :: before & 1 -> goto out
#else
        :: before != COMPLETE(VERSION(c)) -> goto out
#endif
        :: else
        fi
    };
    right = (leaf_a[SLOT(c)] == VERSION(c));
    right = (right && leaf_b[SLOT(c)] == want_b[VERSION(c)]);
    assert(seq[SLOT(c)] != before || right);        /* a changed word: torn, and it knows */
out:
    atomic { c = 0; before = 0; right = 0 }
}
#endif

#define NEXT_ROW  row++; o = 0; if :: row < ROWS -> goto look :: else -> row = 0; goto choose fi
#define NOBODY_READS(slot) \
    row = 0; do :: row < READERS -> assert(dead[row] || reading[row] != (slot) + 1); row++ :: else -> break od; row = 0
#define WATCHED_DIED \
    ((watched & 1) && dead[0] || (watched & 2) && dead[1] || (READERS > 2) && (watched & 4) && dead[READERS - 1])
#define TELL_READERS(then)  WSTEP(notify++); WSTEP(WAKE_READERS; then)

active proctype Writer() {
    byte version = 1, slot, row, p, o, n, used, watched, aborts, poisons;
    bit partial, shut, scanned;

publish:
    atomic {
        slot = 0; partial = 0; n = 0; watched = 0;
        if :: version > PUBLISHES -> goto done :: else fi;
#if PARTIAL
        if :: partial = 0 :: partial = 1 fi;
#endif
        if :: partial -> want_b[version + 1] = want_b[version] :: else -> want_b[version + 1] = version + 1 fi;
#ifdef SCAN_EARLY                   /* slots >= 2: the look that served the last publish serves this one too */
        if :: scanned -> goto choose :: else fi;
#endif
        if :: shut || SLOTS > 1 -> goto scan :: else fi     /* a poisoned arena is shut already */
    };
#ifndef GATE_LATE
    WSTEP(current = CURRENT(version, 0) | GATE; shut = 1);
#endif

scan:
    /* waiting, then reply, then the pins: a reader that unpins after our look sees waiting, and one that bumps
       reply after our look keeps us awake. (The real writer first looks without `waiting`: fewer stores.) */
    used = 0;
#ifndef WAIT_FLAG_LATE
    WSTEP(waiting = 1);
#endif
#ifndef REPLY_LATE
    WSTEP(n = reply);
#endif
look:
    WSTEP(p = pin[row]; if :: p == 0 -> NEXT_ROW :: else fi);
    WSTEP(o = owner[row];
          if
          :: DEAD(o) && o != OWNER(WRITER) -> p = 0
          :: else ->
              used = used | (1 << SLOT(p - 1)); p = 0;
              if :: o != 0 -> watched = watched | (1 << (o - 1)) :: else fi;
              NEXT_ROW
          fi);
#ifdef REAP_UNOWNED                 /* a joiner may have taken the row over, and this is its pin */
    WSTEP(if :: owner[row] != o -> goto look :: else fi);
    WSTEP(pin[row] = 0);
    WSTEP(if :: owner[row] == o -> owner[row] = 0 :: else fi; NEXT_ROW);
#else
    WSTEP(if :: owner[row] == o -> owner[row] = OWNER(WRITER); o = 0 :: else -> o = 0; goto look fi);
    WSTEP(pin[row] = 0);
    WSTEP(owner[row] = 0; NEXT_ROW);
#endif

choose:
#ifdef REPLY_LATE
    WSTEP(n = reply);
#endif
#ifdef WAIT_FLAG_LATE
    WSTEP(waiting = 1);
#endif
#ifdef GATE_LATE                    /* slots = 1: the pins were looked at while the gate was open */
    WSTEP(current = CURRENT(version, 0) | GATE; shut = 1);
#endif
    atomic {                        /* any slot that is neither current nor pinned will do; the design takes the oldest */
#if SLOTS > 1
        p = used | (1 << SLOT(current));
#else
        p = used;
#endif
        slot = 0; do :: slot < SLOTS && (p & (1 << slot)) -> slot++ :: else -> break od; p = 0;
#ifndef SCAN_EARLY
        used = 0;
#endif
        scanned = 1;
        if :: slot < SLOTS -> n = 0; watched = 0; goto write :: else -> slot = 0; scanned = 0 fi;
        if
        :: aborts < ABORTS -> aborts++; n = 0; watched = 0; goto deadline
        :: true
        fi
    };
    WSTEP(if :: reply == n -> writer_asleep = 1; n = 0 :: else -> n = 0; watched = 0; goto scan fi);
#ifdef NO_SLICE
    WSTEP(writer_asleep == 0 -> watched = 0; goto scan);
#endif
    WSTEP((writer_asleep == 0 || WATCHED_DIED) -> writer_asleep = 0; watched = 0; goto scan);

write:
    WSTEP(waiting = 0);
    WSTEP(seq[slot] = WRITING(version + 1));
    WSTEP(NOBODY_READS(slot); leaf_a[slot] = version + 1; if :: poisons < POISONS -> goto exception :: true fi);
    WSTEP(NOBODY_READS(slot);
          if
          :: !partial -> leaf_b[slot] = version + 1
#ifndef NO_CARRY
          :: else -> leaf_b[slot] = leaf_b[SLOT(current)]
#else
          :: else
#endif
          fi);
    WSTEP(seq[slot] = COMPLETE(version + 1); if :: !poisoned -> goto commit :: else fi);
    WSTEP(poisoned = 0);
commit:
    WSTEP(version++; current = CURRENT(version, slot); shut = 0);
#ifdef COMMIT_NOWAKE
    goto publish;
#endif
    TELL_READERS(goto publish);

deadline:                           /* nothing was written: open the gate again on the old version */
    WSTEP(waiting = 0; if :: SLOTS > 1 || poisoned -> goto try_again :: else fi);
    WSTEP(current = CURRENT(version, 0); shut = 0);
#ifdef ABORT_NOWAKE
    goto try_again;
#endif
    TELL_READERS(goto try_again);

exception:                          /* inside update(), slots = 1: the gate stays shut until a full publish repairs it */
    WSTEP(poisons++; poisoned = 1);
#ifdef POISON_OPENS_GATE            /* current gets back the very value that a reader may have in hand */
    WSTEP(current = CURRENT(version, 0); shut = 0);
#endif
#ifdef POISON_NOWAKE
    goto try_again;
#endif
    TELL_READERS(goto try_again);

try_again:                          /* or never: a caller may give up */
    if :: goto publish :: goto done fi;

done:
gone:
    atomic {
        slot = 0; row = 0; p = 0; o = 0; n = 0; used = 0; watched = 0; aborts = 0; poisons = 0; version = 0;
        partial = 0; shut = 0; scanned = 0
    }
}
