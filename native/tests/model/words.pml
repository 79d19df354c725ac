/* The shared words (layout.hpp), what a process does to them in one step, and the ghosts.

   The model is sequentially consistent: every step is one load, one store or one read-modify-write, and
   a fence has no effect. ../litmus checks whether the orderings make the real machine behave so.

   STEP(x)  (readers) and WSTEP(x) (the writer): do x, or be killed just before it, forever.
   A death is final and any process can establish it (a pidfd); `dead` stands for nothing else. */

#ifndef SLOTS
#define SLOTS 1
#endif
#ifndef READERS
#define READERS 2
#endif
#ifndef ROWS
#define ROWS READERS            /* fewer rows than readers: a joiner finds the row of a dead reader */
#endif
#ifndef PUBLISHES
#define PUBLISHES 2             /* version 1 is there at the start */
#endif
#ifndef SECTIONS
#define SECTIONS 1              /* read sections of each reader */
#endif
#ifndef KILLS
#define KILLS 0                 /* how many processes may be killed, readers and writer together */
#endif
#ifndef ABORTS
#define ABORTS 0                /* how many publishes may reach their deadline */
#endif
#ifndef POISONS
#define POISONS 0               /* how many writes in place may raise half way (slots = 1) */
#endif
#ifndef PARTIAL
#define PARTIAL 0               /* 1: a publish may leave out a leaf, which is then carried over (slots >= 2) */
#endif
#ifndef OPTIMISTIC
#define OPTIMISTIC 0            /* 1: one more reader, without a row, under the seqlock alone */
#endif

#define WRITER      READERS                 /* process ids: readers from 0, then the writer */
#define OWNER(id)   ((id) + 1)              /* an owner word is never 0 */
#define DEAD(o)     ((o) != 0 && dead[(o) - 1])

#define GATE        4
#define CURRENT(version, slot)  (((version) << 3) | (slot))
#define VERSION(c)  ((c) >> 3)
#define SLOT(c)     ((c) & 3)
#define COMPLETE(version)       (2 * (version))
#define WRITING(version)        (2 * (version) - 1)

/* publication line */
byte current = CURRENT(1, 0);
byte notify  = 0;                           /* readers sleep on it */
bit  waiting = 0;                           /* a writer sleeps, or is about to */
bit  poisoned = 0;                          /* state == POISONED */

/* slots: a sequence word and a body of two leaves; a leaf holds the version that wrote it */
byte seq[SLOTS] = COMPLETE(1);              /* slots >= 2: the others hold an older life of version 1, never current */
byte leaf_a[SLOTS] = 1;
byte leaf_b[SLOTS] = 1;

/* reader table and reply line */
byte owner[ROWS], pin[ROWS];
byte reply = 0;                             /* the writer sleeps on it */

/* ghosts: not in memory, only for the kill and the assertions */
bit  dead[READERS + 1];
byte kills = 0;
bit  reader_asleep[READERS];
bit  writer_asleep = 0;
byte reading[READERS];                      /* slot + 1 that this reader's section is using */
byte want_b[PUBLISHES + 2] = 1;                 /* leaf_b of each version (leaf_a is the version itself) */

#define STEP(x)  atomic { if :: x :: kills < KILLS -> kills++; dead[me] = 1; reading[me] = 0; goto gone fi }
#define WSTEP(x) atomic { if :: x :: kills < KILLS -> kills++; dead[WRITER] = 1; goto gone fi }

/* futex wake on notify; a wake is a system call after the bump, so a separate step */
#if READERS == 2
#define WAKE_READERS reader_asleep[0] = 0; reader_asleep[1] = 0
#else
#define WAKE_READERS reader_asleep[0] = 0; reader_asleep[1] = 0; reader_asleep[2] = 0
#endif
