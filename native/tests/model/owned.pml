/* A message that a rank has taken from its connection is owned until it is answered.

   Messages and answers come in order, each with its number. The trainer may give up at its deadline and send the next
   message; the worker takes one at a time; Ctrl-C may come between any two steps of the worker's receiver. */

#ifndef SENDS
#define SENDS 3
#endif
#ifndef INTERRUPTS
#define INTERRUPTS 2
#endif

chan messages = [SENDS] of { byte };
chan answers = [8] of { byte };
byte owned = 0, applied = 0;

active proctype Trainer() {
    byte n = 0, seen;
    do
    :: n < SENDS ->
       n++;
       messages!n;
       do
       :: answers?seen ->
          if
#ifdef ANY_ANSWER
          :: true -> assert(applied >= n); break
#else
          :: seen == n -> assert(applied >= n); break
#endif
          :: else                     /* an answer to what was given up */
          fi
       :: n < SENDS -> break          /* the deadline; the last send has all the time it wants */
       od
    :: else -> break
    od
}

active proctype Keeper() {            /* the worker's thread: takes a message when none is owned */
    byte found;
end:
    do
#ifdef TAKE_TWO
    :: messages?found -> owned = found
#else
    :: atomic { owned == 0 && nempty(messages) -> messages?found; owned = found }
#endif
    od
}

active proctype Receiver() {
    byte interrupts = INTERRUPTS, mine;
end:
    do
    :: owned != 0 ->
       mine = owned;
       if
       :: interrupts > 0 -> interrupts--; goto interrupted
       :: true -> applied = mine
       fi;
       if
       :: interrupts > 0 -> interrupts--; goto interrupted
       :: true
       fi;
#ifdef FREE_FIRST
       owned = 0;
       if
       :: interrupts > 0 -> interrupts--; goto interrupted
       :: true
       fi;
       answers!mine;
#else
       answers!mine;
       if
       :: interrupts > 0 -> interrupts--; goto interrupted
       :: true
       fi;
       owned = 0;
#endif
       goto end;
interrupted:                          /* the next receive() finds the same message */
#ifdef DROP_TAKEN
       owned = 0
#else
       skip
#endif
    od
}
