"""``horovod`` is hvdgloo, for all programs of an environment: what ``hvdgloo-run --as-horovod`` does for its workers.

There is one such module, which hvdgloo brings, and this one is replaced by it. Unlike Horovod it is not a package, so
that the two have no file in common: installing or removing either leaves the other whole, and where both are, Python
prefers the package, which is Horovod.
"""

import sys

from hvdgloo.as_horovod import horovod

sys.modules[__name__] = horovod
