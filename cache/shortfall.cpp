// The words of a shortfall.
#include <quire/cache/shortfall.h>

#include <quire/runtime/base/errors.h>

namespace quire {

const char* name_of(Resource resource) {
  switch (resource) {
    case Resource::kSeats:
      return "seats";
    case Resource::kPages:
      return "pages";
    case Resource::kHolds:
      return "holds";
  }
  return "unknown resource";
}

std::string Shortfall::describe() const {
  return concat("short of ", name_of(what), ": needed ", needed, ", free ", free,
                " (not promised to others), held without an owner ", held);
}

}  // namespace quire
