/* Memory of this thread for what is packed. It is kept for the next call: fresh memory costs a page fault per 4 KB. */

#ifndef TINKEX_SCRATCH_H
#define TINKEX_SCRATCH_H

#include <stdlib.h>

/* `count` numbers from a cache line on. */
static inline float *scratch(long count) {
    static _Thread_local float *kept;
    static _Thread_local long size;
    if (count > size) {
        free(kept);
        kept = aligned_alloc(64, (size_t)(count + 15) / 16 * 64);
        if (!kept)
            abort();
        size = count;
    }
    return kept;
}

#endif
