/* The collectives of the shm backend in C: the same rounds on the same segment as rounds.py and pure.py, which say how they work.
 *
 * A round: a rank writes into its slot of the round's parity, says so (`seq`), and waits until all have said so (`gen`). The slots of one
 * parity are free again when the next round is complete. Nothing here is shared but the segment; there are no locks and no atomic
 * read-modify-write, so that ranks with and without this kernel work together. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { OK, TIMED_OUT, GONE, LEFT, MISMATCH, NO_THREAD, NOT_YET };
enum { SUM, PRODUCT, MIN, MAX, AVG, BAND, BOR, BXOR };
enum { F32, F64, F16, BF16, U8, I8, I16, I32, I64 };
enum { CALL_WORDS = 8, PULSE_NS = 10 * 1000 * 1000, YIELDS = 4, TILE = 4096 };
static const uint32_t ALIVE = 1;

/* Layout: segment.py says the same. */
typedef struct {
  uint8_t token[16];
  uint32_t size, gen, sleepers, pad;
  uint64_t slot_bytes, channel_bytes;
  uint8_t rest[4096 - 48];
} Head;
typedef struct {
  uint32_t seq, state;
  uint8_t pad[56];
  uint64_t call[2][CALL_WORDS]; /* what the rank is about to do, by parity */
  uint8_t rest[64];
} Rank;

typedef struct {
  uint8_t *base;
  int32_t rank, size, fd;
  uint32_t round;
  int32_t culprit, closing; /* the rank that a failure is about; whether another thread wants this one to return */
  int64_t timeout_ns, spin_ns, look_ns; /* after `look_ns` a call in which not all take part yet returns NOT_YET */
  int32_t early; /* whether it has, and has not been made again */
} Group;

static Head *head(Group *g) { return (Head *)g->base; }
static Rank *rank_of(Group *g, int r) { return (Rank *)(g->base + sizeof(Head)) + r; }
/* A slot: what the rank gives, then its part of a result. */
static uint8_t *slot(Group *g, int r, uint32_t round) {
  return g->base + sizeof(Head) + g->size * sizeof(Rank) + (2 * (uint64_t)r + (round & 1)) * 2 * head(g)->slot_bytes;
}
static uint8_t *part_slot(Group *g, int r, uint32_t round) { return slot(g, r, round) + head(g)->slot_bytes; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void relax(void) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* Each rank holds a record lock on the byte with its number, which the system takes away when it dies. */
static int is_locked(Group *g, int r) {
  struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = r, .l_len = 1};
  return fcntl(g->fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

static int missing_rank(Group *g, uint32_t round, int *why) {
  for (int r = 0; r < g->size; r++) {
    if (r == g->rank || (int32_t)(__atomic_load_n(&rank_of(g, r)->seq, __ATOMIC_ACQUIRE) - round) >= 0) continue;
    uint32_t state = __atomic_load_n(&rank_of(g, r)->state, __ATOMIC_ACQUIRE);
    int gone = state == ALIVE && !is_locked(g, r);
    /* It may have said its last word, and died, since we looked. */
    if ((state != ALIVE || gone) && (int32_t)(__atomic_load_n(&rank_of(g, r)->seq, __ATOMIC_ACQUIRE) - round) < 0) {
      *why = gone ? GONE : LEFT;
      return r;
    }
  }
  return -1;
}

static int all_there(Group *g, uint32_t round) {
  for (int r = 0; r < g->size; r++)
    if ((int32_t)(__atomic_load_n(&rank_of(g, r)->seq, __ATOMIC_SEQ_CST) - round) < 0) return 0;
  return 1;
}

static void futex_wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Says that this rank's slot is written; whether all others' are. */
static int say_round(Group *g) {
  uint32_t round = ++g->round, *gen = &head(g)->gen;
  __atomic_store_n(&rank_of(g, g->rank)->seq, round, __ATOMIC_SEQ_CST);
  if (!all_there(g, round)) return 0;
  __atomic_store_n(gen, round, __ATOMIC_SEQ_CST); /* the last one sees all; should two think so, no harm is done */
  if (__atomic_load_n(&head(g)->sleepers, __ATOMIC_SEQ_CST)) futex_wake(gen);
  return 1;
}

/* Waits until all others' slots of the round are written too; may be called again. */
static int await_round(Group *g, int64_t timeout_ns) {
  uint32_t round = g->round, *gen = &head(g)->gen;
  int64_t begun = now_ns(), deadline = begun + timeout_ns;
  do {
    for (int i = 0; i < 64; i++) {
      if ((int32_t)(__atomic_load_n(gen, __ATOMIC_ACQUIRE) - round) >= 0) return OK;
      relax();
    }
  } while (now_ns() - begun < g->spin_ns);
  for (int i = 0; i < YIELDS; i++) {
    sched_yield();
    if ((int32_t)(__atomic_load_n(gen, __ATOMIC_ACQUIRE) - round) >= 0) return OK;
  }
  struct timespec pulse = {0, PULSE_NS};
  for (;;) {
    /* A mark, not a count: it is taken down by nobody, so that at worst somebody is woken who is awake. */
    __atomic_store_n(&head(g)->sleepers, 1, __ATOMIC_SEQ_CST);
    uint32_t seen = __atomic_load_n(gen, __ATOMIC_SEQ_CST);
    if ((int32_t)(seen - round) >= 0) return OK;
    if (all_there(g, round)) { /* a rank without this kernel may wake nobody */
      __atomic_store_n(gen, round, __ATOMIC_SEQ_CST);
      futex_wake(gen);
      return OK;
    }
    int why = OK;
    if ((g->culprit = missing_rank(g, round, &why)) >= 0) return why;
    if (__atomic_load_n(&g->closing, __ATOMIC_ACQUIRE)) {
      g->culprit = g->rank;
      return LEFT;
    }
    if (now_ns() > deadline) {
      for (int r = 0; r < g->size; r++)
        if ((int32_t)(__atomic_load_n(&rank_of(g, r)->seq, __ATOMIC_ACQUIRE) - round) < 0) g->culprit = r;
      if (g->culprit >= 0) return TIMED_OUT; /* else they have come since we looked */
      continue;
    }
    syscall(SYS_futex, gen, FUTEX_WAIT, seen, &pulse, NULL, 0);
  }
}

static int complete_round(Group *g) { return say_round(g) ? OK : await_round(g, g->timeout_ns); }

static void say_call(Group *g, const uint64_t *call) { memcpy(rank_of(g, g->rank)->call[(g->round + 1) & 1], call, 8 * CALL_WORDS); }

static int same_calls(Group *g) {
  const uint64_t *mine = rank_of(g, g->rank)->call[g->round & 1];
  for (int r = 0; r < g->size; r++)
    if (memcmp(mine, rank_of(g, r)->call[g->round & 1], 8 * CALL_WORDS)) {
      g->culprit = r;
      return MISMATCH;
    }
  return OK;
}

/* Completes the first round of a call, in which all say what they are about to do. NOT_YET: the same call must be made again, and gives the
 * same in the same place; nothing has been taken yet. */
static int complete_first(Group *g, const uint64_t *call) {
  say_call(g, call);
  int failed = say_round(g) ? OK : await_round(g, least(g->look_ns, g->timeout_ns));
  if ((g->early = failed == TIMED_OUT)) {
    g->round--;
    return NOT_YET;
  }
  return failed ? failed : same_calls(g);
}

/* Sums ------------------------------------------------------------------------------------------------------------------------------- */

#define LOOP(T, NAME, EXPR)                                                                       \
  static void NAME(T *restrict to, const T *a, const T *b, int64_t n) {                          \
    for (int64_t i = 0; i < n; i++) {                                                             \
      T x = a[i], y = b[i];                                                                       \
      to[i] = (T)(EXPR);                                                                          \
    }                                                                                             \
  }
#define NUMBERS(T, S, LOW, HIGH)                                                                  \
  LOOP(T, sum_##S, x + y) LOOP(T, product_##S, x *y) LOOP(T, min_##S, LOW) LOOP(T, max_##S, HIGH)
#define BITS(T, S) LOOP(T, band_##S, x &y) LOOP(T, bor_##S, x | y) LOOP(T, bxor_##S, x ^ y)
#define FLOATS(T, S) NUMBERS(T, S, x != x ? x : y != y ? y : x < y ? x : y, x != x ? x : y != y ? y : x > y ? x : y)
#define INTEGERS(T, S) NUMBERS(T, S, x < y ? x : y, x > y ? x : y) BITS(T, S)

FLOATS(float, f32)
FLOATS(double, f64)
INTEGERS(uint8_t, u8)
INTEGERS(int8_t, i8)
INTEGERS(int16_t, i16)
INTEGERS(int32_t, i32)
INTEGERS(int64_t, i64)

typedef void (*Combine)(void *, const void *, const void *, int64_t);
#define FLOAT_ROW(S) {(Combine)sum_##S, (Combine)product_##S, (Combine)min_##S, (Combine)max_##S, (Combine)sum_##S, 0, 0, 0}
#define INTEGER_ROW(S) \
  {(Combine)sum_##S, (Combine)product_##S, (Combine)min_##S, (Combine)max_##S, 0, (Combine)band_##S, (Combine)bor_##S, (Combine)bxor_##S}
static const Combine COMBINE[][8] = {FLOAT_ROW(f32), FLOAT_ROW(f64), FLOAT_ROW(f32),   FLOAT_ROW(f32),   INTEGER_ROW(u8),
                                     INTEGER_ROW(i8), INTEGER_ROW(i16), INTEGER_ROW(i32), INTEGER_ROW(i64)};
static const int ITEM[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};

static float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return value != value ? 0x7FC0 : (uint16_t)rounded;
}

static void widen(float *to, const uint16_t *from, int64_t n, int dtype) {
#ifdef __FLT16_MANT_DIG__
  if (dtype == F16) {
    for (int64_t i = 0; i < n; i++) to[i] = ((const _Float16 *)from)[i];
    return;
  }
#endif
  for (int64_t i = 0; i < n; i++) to[i] = from_bf16(from[i]);
}
static void narrow(uint16_t *to, const float *from, int64_t n, int dtype) {
#ifdef __FLT16_MANT_DIG__
  if (dtype == F16) {
    for (int64_t i = 0; i < n; i++) ((_Float16 *)to)[i] = (_Float16)from[i];
    return;
  }
#endif
  for (int64_t i = 0; i < n; i++) to[i] = to_bf16(from[i]);
}

static void divide(void *values, int64_t n, int dtype, int size) {
  if (dtype == F64)
    for (int64_t i = 0; i < n; i++) ((double *)values)[i] /= size;
  else
    for (int64_t i = 0; i < n; i++) ((float *)values)[i] /= size;
}

/* `to` = all of `from`, combined in the order of the ranks; half precision in float32, rounded once. */
static void combine(void *to, const void *const *from, int size, int64_t n, int dtype, int op) {
  int half = dtype == F16 || dtype == BF16, item = ITEM[dtype];
  Combine both = COMBINE[dtype][op];
  float total[TILE], wide[TILE];
  for (int64_t at = 0; at < n; at += TILE) {
    int64_t m = least(TILE, n - at);
    char *here = half ? (char *)total : (char *)to + at * item;
    if (half)
      widen(total, (const uint16_t *)from[0] + at, m, dtype);
    else if (size == 1)
      memmove(here, (const char *)from[0] + at * item, m * item);
    for (int r = 1; r < size; r++) {
      const void *next = (const char *)from[r] + at * item;
      if (half) {
        widen(wide, next, m, dtype);
        next = wide;
      }
      both(here, r == 1 && !half ? (const char *)from[0] + at * item : here, next, m);
    }
    if (op == AVG) divide(here, m, dtype, size);
    if (half) narrow((uint16_t *)to + at, total, m, dtype);
  }
}

int hora_can_combine(int dtype, int op) {
#ifndef __FLT16_MANT_DIG__
  if (dtype == F16) return 0;
#endif
  return COMBINE[dtype][op] != 0;
}

/* Collectives. `call` says what the call is; ranks whose calls differ find out in the first round, and nothing of theirs is changed. ----- */

int hora_barrier(Group *g, const uint64_t *call) { return complete_first(g, call); }

static int all_reduce_at_once(Group *g, char *data, int64_t numel, int dtype, int op, const uint64_t *call) {
  const void *from[g->size];
  memcpy(slot(g, g->rank, g->round + 1), data, numel * ITEM[dtype]);
  int failed = complete_first(g, call);
  if (failed) return failed;
  for (int r = 0; r < g->size; r++) from[r] = slot(g, r, g->round);
  combine(data, from, g->size, numel, dtype, op);
  return OK;
}

/* Block by block, each cut into a part a rank: every rank combines its part of a block while the others fetch the parts of the block before. */
int hora_all_reduce(Group *g, void *tensor, int64_t numel, int dtype, int op, int64_t at_once, const uint64_t *call) {
  char *data = tensor;
  int64_t item = ITEM[dtype], n = g->size;
  if (numel * item <= at_once) return all_reduce_at_once(g, data, numel, dtype, op, call);
  int64_t part = head(g)->slot_bytes / n / 64 * 64 / item, block = part * n, blocks = (numel + block - 1) / block;
  for (int64_t b = 0; b <= blocks; b++) {
    char *at = data + b * block * item;
    if (b < blocks)
      for (int64_t r = 0; r < n; r++) {
        int64_t from = r * part, count = most(0, least(part, numel - b * block - from));
        if (r != g->rank) memcpy(slot(g, g->rank, g->round + 1) + from * item, at + from * item, count * item);
      }
    int failed = b ? complete_round(g) : complete_first(g, call);
    if (failed) return failed;
    uint32_t round = g->round;
    if (b < blocks) {
      int64_t from = g->rank * part, count = most(0, least(part, numel - b * block - from));
      const void *parts[n];
      for (int64_t r = 0; r < n; r++) parts[r] = (r == g->rank ? (uint8_t *)at : slot(g, r, round)) + from * item;
      uint8_t *mine = part_slot(g, g->rank, round + 1);
      combine(mine, parts, n, count, dtype, op);
      memcpy(at + from * item, mine, count * item);
    }
    if (b > 0)
      for (int64_t r = 0; r < n; r++) {
        int64_t from = (b - 1) * block + r * part, count = most(0, least(part, numel - from));
        if (r != g->rank) memcpy(data + from * item, part_slot(g, r, round), count * item);
      }
  }
  return OK;
}

int hora_reduce_scatter(Group *g, void *output, const void *const *parts, int64_t numel, int dtype, int op, const uint64_t *call) {
  int64_t item = ITEM[dtype], n = g->size, piece = head(g)->slot_bytes / n / 64 * 64 / item, rounds = most(1, (numel + piece - 1) / piece);
  for (int64_t b = 0; b < rounds; b++) {
    int64_t at = b * piece * item, count = most(0, least(piece, numel - b * piece));
    for (int64_t r = 0; r < n; r++)
      if (r != g->rank) memcpy(slot(g, g->rank, g->round + 1) + r * piece * item, (const char *)parts[r] + at, count * item);
    int failed = b ? complete_round(g) : complete_first(g, call);
    if (failed) return failed;
    const void *from[n];
    for (int64_t r = 0; r < n; r++)
      from[r] = r == g->rank ? (const char *)parts[r] + at : (const char *)slot(g, r, g->round) + g->rank * piece * item;
    combine((char *)output + at, from, n, count, dtype, op);
  }
  return OK;
}

int hora_all_gather(Group *g, void *const *outputs, const void *tensor, int64_t bytes, const uint64_t *call) {
  int64_t piece = head(g)->slot_bytes, rounds = most(1, (bytes + piece - 1) / piece);
  for (int64_t b = 0; b < rounds; b++) {
    int64_t at = b * piece, count = least(piece, bytes - at);
    memcpy(slot(g, g->rank, g->round + 1), (const char *)tensor + at, count);
    int failed = b ? complete_round(g) : complete_first(g, call);
    if (failed) return failed;
    for (int r = 0; r < g->size; r++)
      if (r != g->rank)
        memcpy((char *)outputs[r] + at, slot(g, r, g->round), count);
      else
        memmove((char *)outputs[r] + at, (const char *)tensor + at, count);
  }
  return OK;
}

/* An all-gather of what fits into a slot, in two halves: the next call of the group is hora_collect. */
int hora_post(Group *g, const void *tensor, int64_t bytes, const uint64_t *call) {
  memcpy(slot(g, g->rank, g->round + 1), tensor, bytes);
  say_call(g, call);
  say_round(g);
  return OK;
}

/* NOT_YET: it must be called again. */
int hora_collect(Group *g, void *const *outputs, int64_t bytes) {
  int failed = await_round(g, least(g->look_ns, g->timeout_ns));
  if (failed == TIMED_OUT) return NOT_YET;
  if (!failed) failed = same_calls(g);
  if (failed) return failed;
  for (int r = 0; r < g->size; r++) memcpy(outputs[r], slot(g, r, g->round), bytes);
  return OK;
}

int hora_broadcast(Group *g, void *tensor, int64_t bytes, int root, const uint64_t *call) {
  int64_t piece = head(g)->slot_bytes, rounds = most(1, (bytes + piece - 1) / piece);
  for (int64_t b = 0; b < rounds; b++) {
    int64_t at = b * piece, count = least(piece, bytes - at);
    if (g->rank == root) memcpy(slot(g, root, g->round + 1), (char *)tensor + at, count);
    int failed = b ? complete_round(g) : complete_first(g, call);
    if (failed) return failed;
    if (g->rank != root) memcpy((char *)tensor + at, slot(g, root, g->round), count);
  }
  return OK;
}

/* In the first round all say how much they send to whom, and how much they expect. */
int hora_all_to_all(Group *g, void *const *outputs, const int64_t *expected, const void *const *inputs, const int64_t *sizes, const uint64_t *call) {
  int64_t n = g->size, piece = head(g)->slot_bytes / n / 64 * 64, longest = 0;
  int64_t *mine = (int64_t *)slot(g, g->rank, g->round + 1);
  memcpy(mine, sizes, n * 8);
  memcpy(mine + n, expected, n * 8);
  int failed = complete_first(g, call);
  if (failed) return failed;
  for (int64_t r = 0; r < n; r++) { /* all ranks look at all pairs, so that all refuse alike */
    const int64_t *from = (const int64_t *)slot(g, r, g->round);
    for (int64_t s = 0; s < n; s++) {
      longest = most(longest, from[s]);
      if (from[s] != ((const int64_t *)slot(g, s, g->round))[n + r]) {
        g->culprit = r;
        failed = MISMATCH;
      }
    }
  }
  if (failed) return failed;
  for (int64_t at = 0; at < longest; at += piece) {
    for (int64_t r = 0; r < n; r++)
      if (r != g->rank) memcpy(slot(g, g->rank, g->round + 1) + r * piece, (const char *)inputs[r] + at, most(0, least(piece, sizes[r] - at)));
    if ((failed = complete_round(g))) return failed;
    for (int64_t r = 0; r < n; r++) {
      int64_t count = most(0, least(piece, expected[r] - at));
      if (r != g->rank)
        memcpy((char *)outputs[r] + at, slot(g, r, g->round) + g->rank * piece, count);
      else
        memmove((char *)outputs[r] + at, (const char *)inputs[r] + at, count);
    }
  }
  return OK;
}

/* Lanes: where cores are to spare, a large call is cut into stripes, and each goes through a segment of its own in a thread of its own. ------- */

enum { MAX_LANES = 4 };
typedef enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST } Kind;
typedef struct {
  Kind kind;
  int32_t dtype, op, root;
  char *to;
  const char *from;
  void *const *outputs;
  const void *const *parts;
  int64_t count, at_once; /* elements where a dtype matters, else bytes */
  const uint64_t *call;
} Job;
typedef struct Team Team;
typedef struct {
  Team *team;
  int32_t lane, failed;
  pthread_t thread;
} Worker;
struct Team {
  Group lanes[MAX_LANES];
  Worker workers[MAX_LANES];
  Job job;
  uint32_t ticket, done;
  int32_t num_lanes, started, quit;
};

Team *hora_new_team(void) { return calloc(1, sizeof(Team)); }

void hora_set_lanes(Team *t, int num_lanes) { t->num_lanes = num_lanes; }

static int run_stripe(Team *t, int lane) {
  Job *j = &t->job;
  Group *g = &t->lanes[lane];
  int64_t item = j->kind == ALL_GATHER || j->kind == BROADCAST ? 1 : ITEM[j->dtype];
  int64_t stripe = (j->count / t->num_lanes / 64 + 1) * 64, begin = least(lane * stripe, j->count), count = least(stripe, j->count - begin);
  int64_t at = begin * item;
  void *outputs[g->size];
  const void *parts[g->size];
  for (int r = 0; r < g->size; r++) {
    if (j->outputs) outputs[r] = (char *)j->outputs[r] + at;
    if (j->parts) parts[r] = (const char *)j->parts[r] + at;
  }
  switch (j->kind) {
    case ALL_REDUCE: return hora_all_reduce(g, j->to + at, count, j->dtype, j->op, j->at_once, j->call);
    case REDUCE_SCATTER: return hora_reduce_scatter(g, j->to + at, parts, count, j->dtype, j->op, j->call);
    case ALL_GATHER: return hora_all_gather(g, outputs, j->from + at, count, j->call);
    default: return hora_broadcast(g, j->to + at, count, j->root, j->call);
  }
}

/* Looks for a while, then sleeps, until `word` is no more what it was `seen` to be. */
static void await_change(uint32_t *word, uint32_t seen, int64_t spin_ns) {
  for (int64_t begun = now_ns(); now_ns() - begun < spin_ns;)
    for (int i = 0; i < 64; i++) {
      if (__atomic_load_n(word, __ATOMIC_ACQUIRE) != seen) return;
      relax();
    }
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == seen) syscall(SYS_futex, word, FUTEX_WAIT, seen, NULL, NULL, 0);
}

static void *work(void *argument) {
  Worker *w = argument;
  Team *t = w->team;
  for (uint32_t ticket = 0;;) {
    await_change(&t->ticket, ticket++, t->lanes[0].spin_ns);
    if (__atomic_load_n(&t->quit, __ATOMIC_ACQUIRE)) return NULL;
    w->failed = run_stripe(t, w->lane);
    __atomic_fetch_add(&t->done, 1, __ATOMIC_ACQ_REL);
    futex_wake(&t->done);
  }
}

static int start_workers(Team *t) {
  for (; t->started < t->num_lanes - 1; t->started++) {
    Worker *w = &t->workers[t->started];
    w->team = t;
    w->lane = t->started + 1;
    if (pthread_create(&w->thread, NULL, work, w)) return 0;
  }
  return 1;
}

int hora_run_wide(Team *t, const Job *job) {
  uint32_t others = t->num_lanes - 1, before;
  if (!t->lanes[0].early) { /* else the others are at it */
    t->job = *job;
    if (!start_workers(t)) return NO_THREAD;
    __atomic_store_n(&t->done, 0, __ATOMIC_RELEASE);
    __atomic_fetch_add(&t->ticket, 1, __ATOMIC_ACQ_REL);
    futex_wake(&t->ticket);
  }
  int failed = run_stripe(t, 0);
  if (failed == NOT_YET) return failed;
  while ((before = __atomic_load_n(&t->done, __ATOMIC_ACQUIRE)) < others) await_change(&t->done, before, t->lanes[0].spin_ns);
  for (uint32_t i = 0; i < others; i++)
    if (!failed && t->workers[i].failed) {
      failed = t->workers[i].failed;
      t->lanes[0].culprit = t->lanes[t->workers[i].lane].culprit;
    }
  return failed;
}

void hora_end_team(Team *t) {
  for (int i = 0; i < t->num_lanes; i++) {
    __atomic_store_n(&t->lanes[i].closing, 1, __ATOMIC_RELEASE);
    futex_wake(&head(&t->lanes[i])->gen);
  }
  __atomic_store_n(&t->quit, 1, __ATOMIC_RELEASE);
  __atomic_fetch_add(&t->ticket, 1, __ATOMIC_ACQ_REL);
  futex_wake(&t->ticket);
  for (int i = 0; i < t->started; i++) pthread_join(t->workers[i].thread, NULL);
  t->started = 0;
}

/* Messages between two ranks: a ring of bytes from each rank to each other one, with how much was ever written and ever read. ------------- */

typedef struct {
  uint64_t written;
  uint8_t pad[56];
  uint64_t read;
  uint8_t rest[56];
} Channel;

static Channel *channel(Group *g, int from, int to) {
  uint8_t *begin = g->base + sizeof(Head) + g->size * sizeof(Rank) + 4 * (uint64_t)g->size * head(g)->slot_bytes;
  return (Channel *)(begin + ((uint64_t)from * g->size + to) * (sizeof(Channel) + head(g)->channel_bytes));
}

static int64_t move(uint8_t *ring, int64_t capacity, uint64_t at, uint8_t *bytes, int64_t count, int into_ring) {
  int64_t begin = at % capacity, first = least(count, capacity - begin);
  if (into_ring) {
    memcpy(ring + begin, bytes, first);
    memcpy(ring, bytes + first, count - first);
  } else {
    memcpy(bytes, ring + begin, first);
    memcpy(bytes + first, ring, count - first);
  }
  return count;
}

/* Writes as much as there is room for; how much that was. */
int64_t hora_write(Group *g, int to, void *bytes, int64_t count) {
  Channel *c = channel(g, g->rank, to);
  int64_t capacity = head(g)->channel_bytes, room = capacity - (int64_t)(c->written - __atomic_load_n(&c->read, __ATOMIC_ACQUIRE));
  if ((count = least(count, room)) <= 0) return 0;
  move((uint8_t *)(c + 1), capacity, c->written, bytes, count, 1);
  __atomic_store_n(&c->written, c->written + count, __ATOMIC_RELEASE);
  return count;
}

/* Reads what there is, up to `count`; how much that was. */
int64_t hora_read(Group *g, int from, void *bytes, int64_t count) {
  Channel *c = channel(g, from, g->rank);
  int64_t there = (int64_t)(__atomic_load_n(&c->written, __ATOMIC_ACQUIRE) - c->read);
  if ((count = least(count, there)) <= 0) return 0;
  move((uint8_t *)(c + 1), head(g)->channel_bytes, c->read, bytes, count, 0);
  __atomic_store_n(&c->read, c->read + count, __ATOMIC_RELEASE);
  return count;
}

/* What a gradient goes through on its way into a bucket, in one pass over memory: `to` = `from` / `divisor`. Returns the largest magnitude, as
 * bits, which order magnitudes as numbers do: infinity is more than any number, and what is no number is more than that. */
uint32_t hora_divide(const float *restrict from, float *restrict to, int64_t count, float divisor) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    uint32_t bits;
    memcpy(&bits, from + i, sizeof bits);
    bits &= 0x7fffffffu;
    largest = largest > bits ? largest : bits;
    to[i] = from[i] / divisor;
  }
  return largest;
}
