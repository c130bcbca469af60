/* The adapters of float32 rows: y += B A x, where rows may use different factors.

   Both factors are packed when an adapter is first used, so that they are read from end to end: A in panels of 16
   columns, B in panels of 32 outputs.

   Shapes: K inputs, N outputs. */

#ifndef TINKEX_ADAPTERS_H
#define TINKEX_ADAPTERS_H

#include "numbers.h"

/* Outputs up to `end` use `count` columns from `first` on; their part of B begins at `b`. */
typedef struct { int64_t end, first, count; const float *b; } Span;

/* Adjacent rows with one adapter. */
typedef struct {
    int64_t begin, end, panels, spans;
    const float *a;
    const Span *span;
} Group;

/* The adapters of a batch. `inner` holds as many rows as x, of `stride` numbers: the rows between the factors. */
typedef struct {
    const Group *groups;
    long count;
    float *inner;
    long stride;
} Adapters;

/* Parts of thread `id` of `all`: first the rows between the factors; once all threads have theirs, the update of y. */
void tinkex_adapt_inner(const Adapters *adapters, const float *x, long K, long id, long all);
void tinkex_adapt_outer(const Adapters *adapters, float *y, long N, long id, long all);

#endif
