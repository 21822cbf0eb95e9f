/* What tests preload as `sched_yield`, see yielding.py. */

#include <time.h>

static __thread unsigned turns;

int sched_yield(void) {
    if (++turns % 32) {
        for (int i = 0; i < 40; i++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        return 0;
    }
    struct timespec a_moment = {0, 1000};
    nanosleep(&a_moment, 0);
    return 0;
}
