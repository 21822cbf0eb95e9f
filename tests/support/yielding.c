/* What tests preload as `sched_yield`, see yielding.py. */

#include <time.h>

#define MICROSECOND_NS 1000LL

/* A process that has not yielded for this long has done something else: it begins to wait again. */
static const long long ANOTHER_WAIT_NS = 200 * MICROSECOND_NS;
/* A wait shorter than this costs no sleep. */
static const long long SPIN_NS = 20 * MICROSECOND_NS;
static const long long LONGEST_SLEEP_NS = 1000 * MICROSECOND_NS;

static __thread long long began_ns, returned_ns;

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void spin(void) {
    for (int i = 0; i < 40; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

int sched_yield(void) {
    long long called_ns = now_ns();
    if (called_ns - returned_ns > ANOTHER_WAIT_NS)
        began_ns = called_ns;
    long long sleep_ns = (called_ns - began_ns) / 8; /* the end of a wait is noticed an eighth of it too late */
    if (called_ns - began_ns < SPIN_NS) {
        spin();
    } else {
        struct timespec a_moment = {0, sleep_ns < LONGEST_SLEEP_NS ? sleep_ns : LONGEST_SLEEP_NS};
        nanosleep(&a_moment, 0);
    }
    returned_ns = now_ns();
    return 0;
}
