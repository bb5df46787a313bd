#include "fiber.h"

#include <pthread.h>
#include <sys/mman.h>

#include <mutex>
#include <stdexcept>

#if NEEDLE_SIM_UCONTEXT
#include <ucontext.h>
#endif

#if NEEDLE_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace needle::sim {

char* stack_region = nullptr;

namespace {

// One byte per stack: whether it has memory. Written only by the worker that owns the stack.
unsigned char stack_is_open[kMaxWorkers * kMaxBlockThreads];

char* bottom_of_stack(int index) {
  return stack_region + (static_cast<size_t>(index) << kStackShift) + (kSlotBytes - kStackBytes);
}

// All stacks begin at the same offset of a cache line's set otherwise, and a barrier would be
// nothing but conflict misses: three lines are about what a waiting thread touches.
size_t colour(int index) { return static_cast<size_t>(index) * 192 % 4096; }

}  // namespace

void reserve_stacks() {
  static std::once_flag once;
  std::call_once(once, [] {
    const size_t bytes = kSlotBytes * kMaxWorkers * kMaxBlockThreads;
    void* region = mmap(nullptr, bytes + kSlotBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) throw std::runtime_error("cuda_sim: no address space for stacks");
    const uintptr_t first = reinterpret_cast<uintptr_t>(region) + kSlotBytes - 1;
    stack_region = reinterpret_cast<char*>(first & ~(uintptr_t(kSlotBytes) - 1));
  });
}

#if NEEDLE_SIM_UCONTEXT

void swap_stacks(Context& from, Context& to) {
  ucontext_t here;
  from.saved = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to.saved));
}

static void* first_frame(char* bottom, char* top, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>(bottom);
  getcontext(context);
  context->uc_stack.ss_sp = bottom + sizeof(ucontext_t);
  context->uc_stack.ss_size = static_cast<size_t>(top - bottom) - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

#else

// needle_sim_switch(void** save_stack_pointer, void* stack_pointer): pushes the registers that a
// call preserves, changes stacks, pops. Floating point control words are not kept: kernels do not
// change them.
#if defined(__APPLE__)
#define BEGIN ".text\n.p2align 4\n.globl needle_sim_switch\n.private_extern needle_sim_switch\n"
#define END ""
#else
#define BEGIN                                                                \
  ".text\n.p2align 4\n.globl needle_sim_switch\n.hidden needle_sim_switch\n" \
  ".type needle_sim_switch, %function\n"
#define END ".size needle_sim_switch, . - needle_sim_switch\n"
#endif
#if defined(__x86_64__)
asm(BEGIN R"(needle_sim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)" END);
constexpr int kSavedWords = 6;  // below the return address
constexpr int kReturnWord = 6;
#else
asm(BEGIN R"(needle_sim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)" END);
constexpr int kSavedWords = 20;
constexpr int kReturnWord = 11;  // x30
#endif
#undef BEGIN
#undef END

// What needle_sim_switch would have left there, had `entry` called it as its first act.
static void* first_frame(char*, char* top, void (*entry)()) {
  auto** stack = reinterpret_cast<void**>(top) - 4;
  // A null return address ends backtraces. On x86-64 it lies where `call` would have pushed it, 8
  // bytes below a multiple of 16, and the word under it is what `ret` pops.
  stack[0] = stack[1] = nullptr;
  stack -= kSavedWords;
  for (int i = 0; i < kSavedWords; ++i) stack[i] = nullptr;
  stack[kReturnWord] = reinterpret_cast<void*>(entry);
  return stack;
}

#endif

void prepare_fiber(int index, Context& context, void (*entry)()) {
  char* bottom = bottom_of_stack(index);
  if (!stack_is_open[index]) {
    if (mprotect(bottom, kStackBytes, PROT_READ | PROT_WRITE) != 0)
      throw std::runtime_error("cuda_sim: no memory for a stack");
    stack_is_open[index] = 1;
  }
  context.stack_bottom = bottom;
  context.stack_bytes = kStackBytes;
  context.asan_fake_stack = nullptr;
  context.saved = first_frame(bottom, bottom + kStackBytes - colour(index), entry);
}

void describe_own_stack(Context& context) {
#if NEEDLE_ASAN
  // Asked once per thread: for the first one the answer is read out of /proc/self/maps.
  static thread_local void* bottom = nullptr;
  static thread_local size_t bytes = 0;
  if (bottom == nullptr) {
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &bottom, &bytes);
    pthread_attr_destroy(&attributes);
  }
  context.stack_bottom = bottom;
  context.stack_bytes = bytes;
#else
  (void)context;
#endif
}

void forget_frames(int first_index, int count) {
#if NEEDLE_ASAN
  for (int i = first_index; i < first_index + count; ++i)
    if (stack_is_open[i]) __asan_unpoison_memory_region(bottom_of_stack(i), kStackBytes);
#else
  (void)first_index;
  (void)count;
#endif
}

}  // namespace needle::sim
