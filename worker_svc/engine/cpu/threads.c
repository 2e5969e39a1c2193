#ifdef __linux__
#define _GNU_SOURCE /* for pthread_attr_setaffinity_np and pthread_setname_np */
#endif

#include "threads.h"

#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum {
    SPIN_NS = 150000, /* that a thread looks for its next step before it sleeps (our choice): longer than what the caller does between two calls of a round */
    LOOKS = 32,       /* in a row, about a microsecond, before others get the core */
    PARTS_EACH = 2    /* parts for each thread, so that a slow one leaves some to others */
};

/* Which step it is, counted up, and how many parts it has, in one word: a thread may read it at any time. */
#define PARTS(order) ((int64_t)((order) & 0xFFFF))

static struct {
    _Alignas(64) _Atomic uint64_t order;
    Part part;
    const void *step;
    unsigned rounding; /* how the caller's arithmetic treats odd numbers */
    _Alignas(64) _Atomic int64_t missing; /* parts that are not done */
    _Alignas(64) _Atomic int64_t asleep;  /* threads */
    _Atomic int waiting;                  /* whether the caller sleeps */
    _Atomic int taken;                    /* whether some caller has the team */
    _Atomic int64_t threads;
    int64_t started; /* threads beside the caller's */
    int pinned;
    int cores[MOST_THREADS];
    pthread_mutex_t lock;
    pthread_cond_t ordered, finished;
} team = {.threads = 1, .lock = PTHREAD_MUTEX_INITIALIZER, .ordered = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER};

/* The last order in which each part was begun. */
static struct {
    _Alignas(64) _Atomic uint64_t order;
} begun[PARTS_EACH * MOST_THREADS];

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Look for a while whether a condition has ended. Threads that wait for this core go first: they may be those that are looked for. */
#define SPIN_WHILE(condition)                                                    \
    for (int64_t until = now_ns() + SPIN_NS; (condition) && now_ns() < until;) { \
        for (int look = 0; look < LOOKS && (condition); look++) _mm_pause();     \
        if (condition) sched_yield();                                            \
    }

/* Do the parts of a step that nobody has begun, from a thread's own ones on. Whoever has begun a part may rely on the step: it does not end before. */
static void take_part(uint64_t order, int64_t thread, int64_t threads) {
    const int64_t parts = PARTS(order), first = thread * parts / threads % parts;
    for (int64_t i = 0; i < parts && atomic_load_explicit(&team.order, memory_order_relaxed) == order; i++) {
        const int64_t at = first + i < parts ? first + i : first + i - parts;
        uint64_t last = atomic_load_explicit(&begun[at].order, memory_order_relaxed);
        if (last >= order || !atomic_compare_exchange_strong(&begun[at].order, &last, order)) continue;
        if (thread) _mm_setcsr(team.rounding);
        team.part(team.step, at, parts);
        if (atomic_fetch_sub(&team.missing, 1) == 1 && atomic_load(&team.waiting)) {
            pthread_mutex_lock(&team.lock);
            pthread_cond_signal(&team.finished);
            pthread_mutex_unlock(&team.lock);
        }
    }
}

static uint64_t next_order(uint64_t last) {
    uint64_t order;
    SPIN_WHILE(atomic_load_explicit(&team.order, memory_order_relaxed) == last)
    if ((order = atomic_load(&team.order)) != last) return order;
    pthread_mutex_lock(&team.lock);
    atomic_fetch_add(&team.asleep, 1);
    while ((order = atomic_load(&team.order)) == last) pthread_cond_wait(&team.ordered, &team.lock);
    atomic_fetch_sub(&team.asleep, 1);
    pthread_mutex_unlock(&team.lock);
    return order;
}

static void *work(void *given) {
    const int64_t thread = (intptr_t)given;
    for (uint64_t order = 0;;) {
        order = next_order(order);
        const int64_t threads = atomic_load(&team.threads);
        if (thread < threads) take_part(order, thread, threads);
    }
    return NULL;
}

/* Threads do not outlive a fork. */
static void forget(void) {
    team.started = 0;
    atomic_store(&team.taken, 0);
    atomic_store(&team.asleep, 0);
    atomic_store(&team.waiting, 0);
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.ordered, NULL);
    pthread_cond_init(&team.finished, NULL);
}

/* Start the threads that are missing, as far as the system allows. Signals are left to those that were there before. */
static void start(int64_t threads) {
    static int forgets;
    sigset_t every, before;
    pthread_attr_t attributes;
    if (team.started + 1 >= threads) return;
    if (!forgets && pthread_atfork(NULL, NULL, forget)) return;
    forgets = 1;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (int64_t thread = team.started + 1; thread < threads; thread++) {
        pthread_t handle;
#ifdef __linux__
        cpu_set_t only;
        CPU_ZERO(&only);
        if (team.pinned) CPU_SET(team.cores[thread], &only), pthread_attr_setaffinity_np(&attributes, sizeof only, &only);
#endif
        if (pthread_create(&handle, &attributes, work, (void *)(intptr_t)thread)) break;
#ifdef __linux__
        pthread_setname_np(handle, "laps-sd-kernels"); /* for top -H: 15 bytes is the most */
#endif
        team.started = thread;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void use_threads(int64_t threads, const int *cores) {
    team.pinned = cores != NULL;
    for (int64_t thread = 0; cores && thread < threads; thread++) team.cores[thread] = cores[thread];
    atomic_store(&team.threads, threads);
}

void run_step(Part part, const void *step, int64_t most) {
    const int64_t threads = atomic_load(&team.threads), rounds = most / threads < PARTS_EACH ? most / threads : PARTS_EACH;
    const int64_t parts = most < threads ? most : threads * rounds; /* as many for each thread */
    if (threads == 1 || parts <= 1 || atomic_exchange(&team.taken, 1)) {
        part(step, 0, 1);
        return;
    }
    start(threads);
    team.part = part;
    team.step = step;
    team.rounding = _mm_getcsr();
    atomic_store(&team.missing, parts);
    const uint64_t order = ((atomic_load(&team.order) >> 16) + 1) << 16 | (uint64_t)parts;
    atomic_store(&team.order, order);
    if (atomic_load(&team.asleep)) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.ordered);
        pthread_mutex_unlock(&team.lock);
    }
    take_part(order, 0, threads);
    SPIN_WHILE(atomic_load_explicit(&team.missing, memory_order_relaxed))
    if (atomic_load(&team.missing)) {
        pthread_mutex_lock(&team.lock);
        atomic_store(&team.waiting, 1);
        while (atomic_load(&team.missing)) pthread_cond_wait(&team.finished, &team.lock);
        atomic_store(&team.waiting, 0);
        pthread_mutex_unlock(&team.lock);
    }
    atomic_store(&team.taken, 0);
}
