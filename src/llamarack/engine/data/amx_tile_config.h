/* Forced into every file of a llama.cpp build with AMX by GCC (-include).
 *
 * The header of GCC 12 tells the compiler that _tile_loadconfig reads 8 bytes of the 64 that ldtilecfg reads, so stores
 * to the rest are dropped as dead and the processor gets whatever is on the stack: a fault at the first batch. This
 * spelling names all 64. It does no harm with a GCC whose own header is right.
 */
#include <immintrin.h>
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
static inline __attribute__((always_inline)) void llamarack_tile_loadconfig(const void *config) {
    __asm__ volatile("ldtilecfg\t%X0" ::"m"(*(const char(*)[64])config));
}
#undef _tile_loadconfig
#define _tile_loadconfig llamarack_tile_loadconfig
#endif
