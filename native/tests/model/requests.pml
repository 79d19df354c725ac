/* One request under way for each worker (schemes/remote/base.py): a send that meets an unanswered request waits for
   that one first, and what is answered late counts for nothing but itself.

   A send ends with an answer, with the worker's death or at its deadline. The network keeps requests in order; the
   worker may be killed at any step. */

#ifndef SENDS
#define SENDS 3
#endif
#ifndef DEADLINES
#define DEADLINES 2
#endif

chan inbox = [SENDS] of { byte };
bool answered[SENDS + 1];             /* the answer to each request has arrived */
byte applied = 0, waiting_there = 0;  /* ghost: requests that the worker has not answered */
bit alive = 1;

active proctype Worker() {
    byte n;
end:
    do
    :: atomic { alive && nempty(inbox) -> inbox?n };
end_killed_with_a_request:
       atomic { alive -> applied = n };
end_killed_before_the_answer:
       atomic { alive -> answered[n] = 1; waiting_there-- }
    od
}

active proctype Killer() {
    if
    :: alive = 0
    :: true
    fi
}

active proctype Sender() {
    byte n = 0, call = 0, deadlines = DEADLINES;
    bit said;
    do
    :: n < SENDS ->
       n++;
       said = 0;
#ifndef NO_BUSY
       if
       :: call == 0
       :: call != 0 && answered[call] ->
          call = 0;
#ifdef TAKES_LATE                     /* the late answer ends this send */
          assert(applied >= n);
          said = 1
#endif
#ifndef DEATH_UNSEEN
       :: call != 0 && !alive -> break  /* WorkerDied */
#endif
       :: call != 0 && deadlines > 0 -> deadlines--; said = 1  /* AckTimeout: nothing was asked */
       fi;
#endif
       if
       :: said
       :: else ->
          atomic { inbox!n; call = n; waiting_there++ };
          assert(waiting_there <= 1);  /* else each send costs a message to a worker that does not answer */
          if
          :: answered[n] -> assert(applied >= n); call = 0
#ifdef DEATH_IS_DONE
          :: !alive -> assert(applied >= n); break
#endif
#ifndef DEATH_UNSEEN
          :: !alive -> break
#endif
          :: deadlines > 0 ->
             deadlines--
#ifdef FORGET_AT_DEADLINE
             ; call = 0
#endif
          fi
       fi
    :: else -> break
    od
}
