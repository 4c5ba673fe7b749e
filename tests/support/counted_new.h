// Replaces the global operators new and delete of the program that includes it, once: counts their
// calls, and lets a chosen one fail.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace quire::test {

// Of this thread: the worker of a host stream has its own.
inline thread_local std::int64_t calls_of_new = 0;
inline thread_local std::int64_t calls_of_delete = 0;
// The call of this thread that fails, counted down to; -1: none.
inline thread_local std::int64_t calls_until_failure = -1;
// Allocations of all threads that were not freed.
inline std::atomic<std::int64_t> living_allocations = 0;

inline void* allocate(std::size_t size, std::size_t alignment) noexcept {
  ++calls_of_new;
  if (calls_until_failure >= 0 && calls_until_failure-- == 0) return nullptr;
  living_allocations.fetch_add(1, std::memory_order_relaxed);
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  return std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
}

inline void* allocate(std::size_t size, std::align_val_t alignment) noexcept {
  return allocate(size, static_cast<std::size_t>(alignment));
}

inline void* allocate(std::size_t size) noexcept {
  return allocate(size, alignof(std::max_align_t));
}

inline void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

inline void deallocate(void* memory) noexcept {
  ++calls_of_delete;
  if (memory != nullptr) living_allocations.fetch_sub(1, std::memory_order_relaxed);
  std::free(memory);
}

}  // namespace quire::test

// Every form: those of a sanitizer do not call each other, as the library's do.
using Align = std::align_val_t;
using Quiet = const std::nothrow_t&;
void* operator new(std::size_t size) { return quire::test::or_throw(quire::test::allocate(size)); }
void* operator new[](std::size_t size) {
  return quire::test::or_throw(quire::test::allocate(size));
}
void* operator new(std::size_t size, Align align) {
  return quire::test::or_throw(quire::test::allocate(size, align));
}
void* operator new[](std::size_t size, Align align) {
  return quire::test::or_throw(quire::test::allocate(size, align));
}
void* operator new(std::size_t size, Quiet) noexcept { return quire::test::allocate(size); }
void* operator new[](std::size_t size, Quiet) noexcept { return quire::test::allocate(size); }
void* operator new(std::size_t size, Align align, Quiet) noexcept {
  return quire::test::allocate(size, align);
}
void* operator new[](std::size_t size, Align align, Quiet) noexcept {
  return quire::test::allocate(size, align);
}
void operator delete(void* memory) noexcept { quire::test::deallocate(memory); }
void operator delete[](void* memory) noexcept { quire::test::deallocate(memory); }
void operator delete(void* memory, std::size_t) noexcept { quire::test::deallocate(memory); }
void operator delete[](void* memory, std::size_t) noexcept { quire::test::deallocate(memory); }
void operator delete(void* memory, Align) noexcept { quire::test::deallocate(memory); }
void operator delete[](void* memory, Align) noexcept { quire::test::deallocate(memory); }
void operator delete(void* memory, std::size_t, Align) noexcept { quire::test::deallocate(memory); }
void operator delete[](void* memory, std::size_t, Align) noexcept {
  quire::test::deallocate(memory);
}
