/* A team of threads that compute a step together: the caller's, and others that sleep between calls.

   A step has parts, and each part is done by one thread, the same way by any, so that what is computed does not depend on how many there are. The caller
   does what no other has begun: where the others have no core to run on, a step takes as long as on one thread. One caller at a time has the team;
   others compute alone meanwhile. */

#pragma once

#include <stdint.h>

enum { MOST_THREADS = 256 };

/* One of the parts of a step. */
typedef void (*Part)(const void *step, int64_t part, int64_t parts);

/* From now on steps take up to so many threads, 1 .. MOST_THREADS. With cores, the threads beside the caller's start on cores[1] and so on and stay
   there. They start when a step first needs them, and again in a process that was forked. */
void use_threads(int64_t threads, const int *cores);

/* Do all parts of a step, at most `most` parts. */
void run_step(Part part, const void *step, int64_t most);

/* Where a part begins that has its share of `count` things in a row, in multiples of `grain`; where the next one begins is its end. */
static inline int64_t share(int64_t count, int64_t grain, int64_t part, int64_t parts) {
    const int64_t grains = (count + grain - 1) / grain, at = grains * part / parts * grain;
    return at < count ? at : count;
}
