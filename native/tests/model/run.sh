#!/bin/sh
# Runs the protocol models with spin: the design must hold, every mutation must fail.
#   run.sh          the bounded runs, for CI
#   run.sh --full   the large runs as well (minutes to an hour, up to 12 GB)
# Exit status: 0 if everything came out as expected (or spin is absent), 1 otherwise.
set -u
here=$(cd "$(dirname "$0")" && pwd)
full=no
case "${1-}" in
    '') ;;
    --full) full=yes ;;
    *) echo "usage: $0 [--full]" >&2; exit 2 ;;
esac

if ! command -v spin >/dev/null 2>&1; then
    echo "spin is not installed: the protocol models are not run (Debian package: spin)."
    exit 0
fi
CC=${CC:-gcc}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM
surprises=0

# check EXPECTED LABEL MODEL [-DFLAG...]: EXPECTED is `holds` or `fails`. Safety: an assertion, or a process asleep
# forever (an invalid end state). A search that was cut off proves nothing, so it is a surprise too.
optimize=-O0 memory=2500 hash=20 depth=200000
build=-DSAFETY search=
check() {
    expected=$1 label=$2 model=$3
    shift 3
    dir=$work/run
    rm -rf "$dir" && mkdir "$dir"
    if ! (cd "$dir" && spin -a "$@" "$here/$model" >spin.log 2>&1 &&
          $CC $optimize $build -DMEMLIM=$memory -w -o pan pan.c >cc.log 2>&1); then
        cat "$dir"/*.log >&2
        outcome='does not build'
    else
        (cd "$dir" && ./pan -m$depth -w$hash $search >out 2>&1)
        case $(cat "$dir/out") in
            *'search depth too small'* | *'out of memory'* | *'reached -DMEMLIM'*) outcome='cut off' ;;
            *'errors: 0'*) outcome=holds ;;
            *'pan:1: assertion violated'*) outcome='fails: assertion' ;;
            *'pan:1: invalid end state'*) outcome='fails: asleep forever' ;;
            *'pan:1: acceptance cycle'*) outcome='fails: starves' ;;
            *) outcome='no result' ;;
        esac
    fi
    verdict=ok
    case $outcome in
        "$expected"*) ;;
        *) verdict=SURPRISE surprises=$((surprises + 1)); cat "$dir/out" >&2 2>/dev/null ;;
    esac
    states=$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1/p' "$dir/out" 2>/dev/null | head -n 1)
    printf '%-9s %-26s %-52s %10s  %s\n' "$verdict" "$outcome" "$label" "${states:--}" "$*"
}
design() { check holds "$@"; }
mutant() { check fails "$1" "$2" "-D$1" $3; }

printf '%-9s %-26s %-52s %10s  %s\n' '' outcome what states flags
p=publication.pml
design 'in place: two publishes'                      $p -DSLOTS=1
design 'in place: one process killed'                 $p -DSLOTS=1 -DKILLS=1
design 'in place: two killed, a deadline'             $p -DSLOTS=1 -DKILLS=2 -DABORTS=1 -DPUBLISHES=1
design 'in place: poisoned, repaired, one killed'     $p -DSLOTS=1 -DKILLS=1 -DPOISONS=1 -DPUBLISHES=1
design 'in place: row taken over, two killed'         $p -DSLOTS=1 -DKILLS=2 -DROWS=1
design 'in place: optimistic beside pinned readers'   $p -DSLOTS=1 -DOPTIMISTIC=1 -DPUBLISHES=1
design '2 slots: partial publishes, one killed'       $p -DSLOTS=2 -DKILLS=1 -DPARTIAL=1
design '2 slots: a deadline, three publishes'         $p -DSLOTS=2 -DABORTS=1 -DPUBLISHES=3
design '2 slots: row taken over, two killed'          $p -DSLOTS=2 -DKILLS=2 -DROWS=1 -DPUBLISHES=3
design '2 slots: optimistic beside pinned readers'    $p -DSLOTS=2 -DOPTIMISTIC=1
design '3 slots: three publishes'                     $p -DSLOTS=3 -DPUBLISHES=3

mutant NO_RELOAD             $p '-DSLOTS=1'
mutant NO_RELOAD             $p '-DSLOTS=2'
mutant NOTIFY_LATE           $p '-DSLOTS=1'
mutant UNPIN_NOWAKE          $p '-DSLOTS=1'
mutant UNPIN_NOWAKE          $p '-DSLOTS=2'
mutant BACKOFF_NOWAKE        $p '-DSLOTS=1'
mutant WAKE_CHECK_EARLY      $p '-DSLOTS=1'
mutant WAIT_FLAG_LATE        $p '-DSLOTS=1'
mutant REPLY_LATE            $p '-DSLOTS=1'
mutant GATE_LATE             $p '-DSLOTS=1'
mutant COMMIT_NOWAKE         $p '-DSLOTS=1'
mutant ABORT_NOWAKE          $p '-DSLOTS=1 -DABORTS=1'
mutant NO_SLICE              $p '-DSLOTS=1 -DKILLS=1'
mutant LIVENESS_LATE         $p '-DSLOTS=1 -DKILLS=1'
mutant SERVE_ODD             $p '-DSLOTS=1 -DKILLS=1'
mutant SERVE_CURRENT_VERSION $p '-DSLOTS=1 -DKILLS=1'
mutant POISON_OPENS_GATE     $p '-DSLOTS=1 -DPOISONS=1'
mutant POISON_NOWAKE         $p '-DSLOTS=1 -DPOISONS=1'
mutant TAKEOVER_KEEPS_PIN    $p '-DSLOTS=1 -DKILLS=1 -DROWS=1'
mutant TAKEOVER_NOWAKE       $p '-DSLOTS=1 -DKILLS=1 -DROWS=1'
mutant REAP_UNOWNED          $p '-DSLOTS=2 -DKILLS=1 -DROWS=1'
mutant SCAN_EARLY            $p '-DSLOTS=2'
mutant NO_CARRY              $p '-DSLOTS=2 -DPARTIAL=1'
mutant PARITY_ONLY           $p '-DSLOTS=2 -DOPTIMISTIC=1'

r=requests.pml
design 'requests: three sends, two deadlines, a death'  $r
mutant NO_BUSY               $r ''
mutant FORGET_AT_DEADLINE    $r ''
mutant TAKES_LATE            $r ''
mutant DEATH_UNSEEN          $r ''
mutant DEATH_IS_DONE         $r ''

o=owned.pml
design 'ranks: two givings-up, two interrupts'        $o
mutant TAKE_TWO              $o ''
mutant FREE_FIRST            $o ''
mutant DROP_TAKEN            $o ''
mutant ANY_ANSWER            $o ''

f=relay.pml
design 'relays: two sends, two killed'                $f
mutant ANNOUNCE_EARLY        $f ''
mutant OWN_NUMBERS           $f ''
mutant KEEPS_ARENA           $f ''
mutant POSTED_IS_DONE        $f ''
mutant FORGIVEN              $f ''
mutant DEATH_UNSEEN          $f ''

d=device.pml
design 'device: in place'                             $d -DSLOTS=1 -DPUBLISHES=2
design 'device: 2 slots'                              $d -DSLOTS=2 -DPUBLISHES=2
design 'device: 3 slots, one reader'                  $d -DSLOTS=3 -DPUBLISHES=4 -DREADERS=1
design 'device: 2 slots, a trainer that waits'        $d -DSLOTS=2 -DWAIT_ACKS -DREADERS=1
mutant COMMIT_EARLY          $d '-DSLOTS=1'
mutant COMMIT_EARLY          $d '-DSLOTS=2'
mutant NO_SETTLE             $d '-DSLOTS=2'
mutant HELD_LATE             $d '-DSLOTS=1'
mutant HELD_LATE             $d '-DSLOTS=2'
mutant NO_HELD               $d '-DSLOTS=1'
mutant NO_HELD               $d '-DSLOTS=2'
mutant ACK_EARLY             $d '-DSLOTS=2 -DWAIT_ACKS -DREADERS=1'

build=-DNOREDUCE search='-a -f'
design 'turn rule: a waiting reader gets in'          want.pml
mutant NO_WANT               want.pml ''
mutant NO_WANT_ON_BACKOFF    want.pml ''
build=-DSAFETY search=

if [ $full = yes ]; then
    optimize=-O2 memory=12000 hash=26 depth=2000000
    build='-DSAFETY -DCOLLAPSE'
    design 'in place: three readers'                  $p -DSLOTS=1 -DREADERS=3 -DPUBLISHES=1
    design 'in place: three readers, one killed'      $p -DSLOTS=1 -DREADERS=3 -DPUBLISHES=1 -DKILLS=1
    design 'in place: two sections, killed, deadline' $p -DSLOTS=1 -DSECTIONS=2 -DKILLS=2 -DABORTS=1
    design 'in place: three readers on two rows'      $p -DSLOTS=1 -DREADERS=3 -DROWS=2 -DPUBLISHES=1 -DKILLS=2
    design 'in place: poison, deadline, two killed'   $p -DSLOTS=1 -DPOISONS=2 -DABORTS=1 -DKILLS=2
    design '2 slots: two sections, killed, deadline'  $p -DSLOTS=2 -DSECTIONS=2 -DPUBLISHES=3 -DKILLS=2 -DABORTS=1
    design '2 slots: three readers on two rows'       $p -DSLOTS=2 -DREADERS=3 -DROWS=2 -DPUBLISHES=2 -DKILLS=2
    design '3 slots: killed, deadline, partial'       $p -DSLOTS=3 -DPUBLISHES=4 -DKILLS=1 -DABORTS=1 -DPARTIAL=1
    design 'device: 2 slots, three publishes'         $d -DSLOTS=2
    design '3 slots: optimistic, killed'              $p -DSLOTS=3 -DPUBLISHES=3 -DOPTIMISTIC=1 -DKILLS=1
fi

if [ $surprises -ne 0 ]; then
    echo "$surprises surprise(s): see above." >&2
    exit 1
fi
echo 'The design holds, every mutation fails.'
