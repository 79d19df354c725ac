/* Messages through a store without queues are owned until they are answered (ADR 18).

   Content under one key, a bell under another; the writer sets the content first. Who hears the bell deletes it before
   it reads. A message is taken by compare-and-set, stays the worker's until its answer is on its way, and the answer
   carries its number. The trainer may give up at its deadline and a successor send the next number over the old
   content; Ctrl-C may come between any two steps of the worker's receiver. */

#ifndef SENDS
#define SENDS 3
#endif
#ifndef INTERRUPTS
#define INTERRUPTS 2
#endif

byte content = 0, answer = 0, owned = 0, applied = 0;
bit bell, answer_bell;

active proctype Trainer() {
    byte n = 0;
    do
    :: n < SENDS ->
       n++;
#ifdef BELL_FIRST
       bell = 1; content = n;
#else
       content = n; bell = 1;
#endif
       do
       :: answer_bell ->
#ifdef ANSWER_READ_FIRST
          byte seen = answer;
          answer_bell = 0;
#else
          answer_bell = 0;
          byte seen = answer;
#endif
          if
#ifdef ANY_ANSWER
          :: seen != 0 -> assert(applied >= n); break
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

active proctype Courier() {           /* the worker's: takes a message when none is under way */
    byte found;
end:
    do
    :: atomic { owned == 0 && bell };
#ifdef READ_FIRST
       found = content; bell = 0;
#else
       bell = 0; found = content;
#endif
       if
       :: found == 0                  /* the bell rang twice for one content */
#ifdef TAKE_BLIND
       :: found != 0 -> content = 0; owned = found
#else
       :: atomic { found != 0 && content == found -> content = 0; owned = found }
       :: found != 0 && content != found  /* a newer one, whose bell is still to come */
#endif
       fi
    od
}

active proctype Receiver() {
    byte interrupts = INTERRUPTS;
end:
    do
    :: owned != 0 ->
       if
       :: interrupts > 0 -> interrupts--; goto interrupted
       :: true -> applied = owned
       fi;
       if
       :: interrupts > 0 -> interrupts--; goto interrupted
       :: true
       fi;
#ifdef ANSWER_BELL_FIRST
       answer_bell = 1; answer = owned;
#else
       answer = owned;
       if
       :: interrupts > 0 -> interrupts--; goto interrupted
       :: true
       fi;
       answer_bell = 1;
#endif
       owned = 0;
       goto end;
interrupted:                          /* the next receive() finds the same message */
#ifdef DROP_TAKEN
       owned = 0
#else
       skip
#endif
    od
}
