#include "faults.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

#include "scheduler.h"

namespace needle::sim {

namespace {

constexpr size_t kSignalStackBytes = 64 * 1024;
constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction previous[3];

// What the handler found, for the fiber that it sends to report_fault. A fiber belongs to one
// worker: no two write one.
struct Found {
  int signal;
  bool addressed;  // on x86-64, what is misaligned or beyond 48 bits comes without its address
  void* address;
  void* pc;
};
Found found[kMaxWorkers];

#if defined(__x86_64__)
constexpr size_t kEntryMisalignment =
    8;  // a function starts just after `call` pushed a return address
#else
constexpr size_t kEntryMisalignment = 0;
#endif

// The registers of an interrupted thread that are known here: where it was, and its stack.
#if defined(__APPLE__) && defined(__x86_64__)
#define PC uc_mcontext->__ss.__rip
#define SP uc_mcontext->__ss.__rsp
#elif defined(__APPLE__)
#define PC uc_mcontext->__ss.__pc
#define SP uc_mcontext->__ss.__sp
#elif defined(__x86_64__)
#define PC uc_mcontext.gregs[REG_RIP]
#define SP uc_mcontext.gregs[REG_RSP]
#elif defined(__aarch64__)
#define PC uc_mcontext.pc
#define SP uc_mcontext.sp
#endif
void** instruction_pointer(ucontext_t* context) {
#ifdef PC
  return reinterpret_cast<void**>(&context->PC);
#else
  (void)context;
  return nullptr;
#endif
}
uintptr_t* stack_pointer(ucontext_t* context) {
#ifdef SP
  return reinterpret_cast<uintptr_t*>(&context->SP);
#else
  (void)context;
  return nullptr;
#endif
}
#undef PC
#undef SP

// Whether the signal has the address that was accessed; the null pointer is one.
bool is_addressed([[maybe_unused]] const siginfo_t& info) {
#ifdef SI_KERNEL
  return info.si_code != SI_KERNEL;
#else
  return true;
#endif
}

// Runs on the fiber's stack, from its top: what was there will never be resumed.
[[noreturn]] void report_fault() {
  Thread& thread = self();
  const Found what = found[(&thread - thread_table) / kMaxBlockThreads];
  Block& block = *static_cast<Block*>(thread.block);
  char text[96];
  const char* closed = stack_region + ((&thread - thread_table) << kStackShift);
  const auto offset = static_cast<size_t>(static_cast<char*>(what.address) - closed);
  if (what.signal == SIGFPE)
    std::snprintf(text, sizeof text, "integer division by zero");
  else if (offset < kSlotBytes - kStackBytes)
    std::snprintf(text, sizeof text, "stack overflow: local variables exceed %zu KB",
                  kStackBytes / 1024);
  else if (!what.addressed)
    std::snprintf(text, sizeof text, "misaligned or impossible address");
  else
    std::snprintf(text, sizeof text, "invalid address %p", what.address);
  std::string place = block.in_shared(what.address) ? ", " + block.describe(what.address) : "";
  block.fault(thread, text + place + " at " + describe_code_address(what.pc), {"", 0});
}

void on_signal(int signal, siginfo_t* info, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  const uintptr_t stack = stack_pointer(context) ? *stack_pointer(context) : 0;
  if (stack != 0 && on_fiber_stack(reinterpret_cast<void*>(stack))) {
    const size_t index = (stack - reinterpret_cast<uintptr_t>(stack_region)) >> kStackShift;
    found[index / kMaxBlockThreads] = {signal, is_addressed(*info), info->si_addr,
                                       *instruction_pointer(context)};
    const uintptr_t top = reinterpret_cast<uintptr_t>(stack_region) + ((index + 1) << kStackShift);
    *stack_pointer(context) = top - 64 - kEntryMisalignment;
    *instruction_pointer(context) = reinterpret_cast<void*>(report_fault);
    return;
  }
  // Not ours: put the earlier handler back and let the instruction fault again.
  for (size_t i = 0; i < 3; ++i)
    if (kSignals[i] == signal) sigaction(signal, &previous[i], nullptr);
}

}  // namespace

void prepare_thread_for_faults() {
  if (NEEDLE_ASAN) return;  // its own report says more
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (size_t i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &previous[i]);
  });
  static thread_local bool ready = false;
  if (ready) return;
  ready = true;
  stack_t stack{};
  if (sigaltstack(nullptr, &stack) == 0 && !(stack.ss_flags & SS_DISABLE))
    return;  // somebody's, and good enough
  stack.ss_sp =
      mmap(nullptr, kSignalStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  stack.ss_size = kSignalStackBytes;
  stack.ss_flags = 0;
  if (stack.ss_sp != MAP_FAILED) sigaltstack(&stack, nullptr);
}

std::string describe_code_address(const void* pc) {
  static std::map<const void*, std::string> known;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  std::string& text = known[pc];
  if (!text.empty()) return text;
  Dl_info module{};
  if (!dladdr(pc, &module) || !module.dli_fname) return text = "an unknown place";
  // An executable linked to a fixed address (ELF type 2) has absolute addresses in its tables.
  const char* base = static_cast<const char*>(module.dli_fbase);
  uint16_t elf_type;
  std::memcpy(&elf_type, base + 16, sizeof elf_type);
  char offset[32];
  std::snprintf(
      offset, sizeof offset, "0x%zx",
      static_cast<size_t>(static_cast<const char*>(pc) - (elf_type == 2 ? nullptr : base)));
  text = std::string(module.dli_fname) + "+" + offset;
  // binutils come with the compiler that built this. Inlined callers follow the innermost place;
  // the first that is not the emulator's own header is the kernel's line.
  const std::string command =
      std::string("addr2line -i -e '") + module.dli_fname + "' " + offset + " 2>/dev/null";
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) return text;
  char line[1024];
  for (bool found_line = false; std::fgets(line, sizeof line, pipe);) {
    std::string place(line, std::strcspn(line, "\n"));
    place = place.substr(0, place.find(" (discriminator"));
    if (found_line || place[0] == '?' || place.find("/common/cuda_sim/") != std::string::npos ||
        place.find("/ptx.h:") != std::string::npos)
      continue;
    text = place;
    found_line = true;
  }
  pclose(pipe);
  return text;
}

}  // namespace needle::sim
