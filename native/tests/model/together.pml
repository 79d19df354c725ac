/* send_together's meeting (schemes/pipes/multi_model.py, ADR 12): no worker makes a step with one model new and another old.

   PREPARE, PREPARED from all workers, publish, one message for each model, or RESUME. SHARED = 1: models lie in arenas,
   so each worker that is not in receive() uses at once what is written. SHARED = 0: messages bring private copies.

   clock: 0 within the deadline, 1 past it, 2 past the grace that a worker waits on. The grace does not end between
   the trainer's look at the clock and its last message: that is what the half second of grace is for, and with arenas
   a trainer that is stopped there for longer is the one gap. */

#define WORKERS 2
#ifndef SHARED
#define SHARED 0
#endif
#ifndef MEETINGS
#define MEETINGS 2
#endif

mtype = { prepare, a_new, b_new, resume };
chan pipe[WORKERS] = [8] of { mtype, byte };   /* to a worker; the number of the meeting */
byte prepared[WORKERS], got[WORKERS];          /* answers: the last meeting that it came to, that it applied */
byte a[WORKERS], b[WORKERS];                   /* private copies */
byte arena_a, arena_b;
byte clock = 0, now_meeting = 0;
bit writing = 0;

#define A(w) (SHARED -> arena_a : a[w])
#define B(w) (SHARED -> arena_b : b[w])

active [WORKERS] proctype Worker() {
    byte me = _pid, number, meeting = 0, refused = 0, of_a, of_b;
    bit has_a, has_b;
    mtype kind;
end:
    do
    :: of_a = A(me); of_b = B(me);    /* a step: one forward of each model */
       assert(of_a == of_b)
    :: pipe[me]?kind, number ->       /* receive() */
       if
       :: kind == prepare ->
join:
          meeting = number; has_a = 0; has_b = 0;
          refused = number;           /* what comes of this meeting alone is refused from here on */
          prepared[me] = number;
          do
          :: has_a && has_b ->
             atomic { a[me] = meeting; b[me] = meeting; refused = 0; got[me] = meeting };
             break
#ifdef ONE_BY_ONE
          :: has_a && !has_b -> a[me] = meeting; break
#endif
          :: !(has_a && has_b) && nempty(pipe[me]) ->
             pipe[me]?kind, number;
             if
             :: kind == a_new -> has_a = (number == meeting)
             :: kind == b_new -> has_b = (number == meeting)
             :: kind == resume && number == meeting ->
#ifdef RESUME_APPLIES
                if :: has_a -> a[me] = meeting :: else fi;
#endif
                refused = 0;
                break
             :: kind == resume && number != meeting
             :: kind == prepare -> goto join  /* the trainer has given the last one up */
             fi
#ifdef NO_GRACE
          :: clock > 0 || meeting != now_meeting -> break
#else
          :: clock == 2 || meeting != now_meeting -> break  /* its time is over: the trainer was stopped, perhaps */
#endif
          od
       :: kind == resume ->
          if
          :: number == refused -> refused = 0
          :: else
          fi
#ifdef NO_REFUSAL
       :: kind == a_new -> a[me] = number
       :: kind == b_new -> b[me] = number
#else
       :: kind == a_new || kind == b_new -> assert(number == refused)  /* refused: it keeps what it had of both */
#endif
       fi
    od
}

active proctype Clock() {
end:
    do
    :: clock == 0 -> clock = 1
    :: atomic { clock == 1 && !writing -> clock = 2 }
    :: atomic { clock == 2 && timeout -> break }
    od
}

active proctype Trainer() {
    byte n = 0, i;
    do
    :: n < MEETINGS ->
       n++;
       atomic { clock = 0; now_meeting = n };
       i = 0;
       do :: i < WORKERS -> pipe[i]!prepare, n; i++ :: else -> break od;
#ifndef PUBLISH_EARLY
       if
       :: prepared[0] == n && prepared[1] == n
       :: clock > 0 -> goto off       /* a worker does not come: nothing is written */
       fi;
#endif
#ifdef NO_LOOK_AT_CLOCK
       writing = 1;
#else
       atomic {
           if
           :: clock == 0 -> writing = 1
           :: else -> goto off        /* this process was stopped, perhaps, and the workers wait no more */
           fi
       };
#endif
       arena_a = n; arena_b = n;
       i = 0;
       do
       :: i < WORKERS ->
          pipe[i]!a_new, n;
          if
          :: pipe[i]!b_new, n
          :: !SHARED -> writing = 0; pipe[i]!b_new, n  /* stopped between two messages, for as long as it likes */
          :: goto off                 /* Ctrl-C between two messages */
          fi;
          i++
       :: else -> break
       od;
       writing = 0;
       if
       :: got[0] == n && got[1] == n ->
          assert(A(0) == n && B(0) == n && A(1) == n && B(1) == n);
          goto next
       :: clock > 0
       fi;
off:
       writing = 0;
       i = 0;
       do :: i < WORKERS -> pipe[i]!resume, n; i++ :: else -> break od;
next:  skip
    :: else -> break
    od
}
