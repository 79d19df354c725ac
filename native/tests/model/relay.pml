/* Fan-out through a relay (schemes/remote/nodes.py): the relay publishes, then every worker of its node
   attaches to the announced arena and answers. The relay may be killed at any step; within a send another takes its place once, with
   the same parcel at the same version, and all workers move to its arena.

   An arena that is mapped outlives its relay; one that is not cannot be attached to any more. Workers do not die here. */

#define WORKERS 2
#ifndef SENDS
#define SENDS 2
#endif
#ifndef KILLS
#define KILLS 2
#endif
#define RELAYS (KILLS + 1)
#define NONE 255

byte arena[RELAYS];                   /* the version that each relay has published; 0: no arena yet */
bool dead[RELAYS];
byte parcel[RELAYS];                  /* what the relay was asked to publish; 0: nothing */
bool announced[RELAYS];
byte relay = 0;                       /* the relay that the trainer knows */

byte post_relay[WORKERS], post_version[WORKERS];  /* the request to a worker; version 0: none */
byte shows[WORKERS];                  /* the version that the worker's model shows */
mtype = { none, updated, failed };
mtype said[WORKERS] = none;

active [RELAYS] proctype Relay() {
    byte me = _pid;
end:
    do
    :: atomic { parcel[me] != 0 && !dead[me] && !announced[me] };
#ifdef ANNOUNCE_EARLY
       atomic { if :: !dead[me] -> announced[me] = 1 :: else fi }
#endif
       atomic {
           if
           :: dead[me]
#ifdef OWN_NUMBERS                    /* a new relay's arena begins at version 1 */
           :: !dead[me] -> arena[me]++
#else
           :: !dead[me] -> arena[me] = parcel[me]
#endif
           fi
       };
       atomic { if :: !dead[me] -> announced[me] = 1 :: else fi; parcel[me] = 0 }
    od
}

active proctype Killer() {
    byte kills = 0;
end:
    do
    :: kills < KILLS -> atomic { dead[relay] = 1; kills++ }
    od
}

active [WORKERS] proctype Worker() {
    byte me = _pid - RELAYS - 1, attached = NONE, from;
end:
    do
    :: post_version[me] != 0 ->
       from = post_relay[me];
       atomic {
           if
#ifdef KEEPS_ARENA                    /* a worker that has an arena looks there */
           :: attached != NONE && attached != from -> skip
#endif
           :: attached == from
           :: attached != from && !dead[from] && arena[from] != 0 -> attached = from
           :: else -> said[me] = failed; post_version[me] = 0; goto end
           fi
       };
       assert(arena[attached] >= shows[me]);  /* versions only grow */
       shows[me] = arena[attached];
       atomic { said[me] = updated; post_version[me] = 0 }
    od
}

active proctype Trainer() {
    byte version = 0, restarts, i;
    bool done[WORKERS], told;         /* told: the outcome names the relay, so the send raises WorkerDied */
    do
    :: version < SENDS ->
       version++;
       restarts = 1;
       told = 0;
       done[0] = 0; done[1] = 0;
ask:
       atomic { announced[relay] = 0; parcel[relay] = version };
       if
       :: announced[relay]
#ifndef DEATH_UNSEEN
       :: dead[relay] && !announced[relay] -> goto lost
#endif
       fi;
       atomic {
           i = 0;
           do
           :: i < WORKERS -> post_relay[i] = relay; said[i] = none; post_version[i] = version; i++
           :: else -> break
           od
       };
       i = 0;
       do
       :: i < WORKERS ->
#ifdef POSTED_IS_DONE
          done[i] = 1; assert(shows[i] >= version);
#endif
          (said[i] != none);
          if
          :: said[i] == updated -> done[i] = 1; assert(shows[i] >= version)
          :: else -> done[i] = 0
          fi;
          i++
       :: else -> break
       od;
       if
       :: done[0] && done[1]
#ifdef FORGIVEN                       /* a worker that cannot attach is left out: no relay replaces the dead one */
       :: else -> goto over
#else
       :: else -> goto lost
#endif
       fi;
       goto over;
lost:
       told = 1;
       if
       :: relay + 1 < RELAYS -> relay++
       :: else -> break
       fi;
       if
       :: restarts > 0 -> restarts--; goto ask
       :: else
       fi;
over:
       assert((done[0] && done[1]) || told)  /* no worker is left out without an error */
    :: else -> break
    od
}
