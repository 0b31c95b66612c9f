"""An archive of the classes that Spark's JVMs load, from which the tests' JVMs start in two thirds of the time.

``python -m tests.support.spark_archive`` makes it in this environment, in half a minute. It is of one Java; another one
does without it, as all do where there is none. See the java manual on ``-XX:ArchiveClassesAtExit``.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pyspark
from pyspark.ml.feature import VectorAssembler

from tests.support import spark as support


def main() -> None:
    """Let a JVM do what tests do, and keep its classes."""
    support.ARCHIVE.parent.mkdir(exist_ok=True)
    coming = support.ARCHIVE.with_suffix(".coming")
    options = f"{support.COMPILER_OPTIONS} -XX:ArchiveClassesAtExit={coming} -Xlog:disable -Xlog:all=error:stderr"
    # The wheel's own Spark, and not a folder that goes: the archive names the jars by where they were.
    with closing(support.Sessions(Path(pyspark.__file__).parent)) as sessions, tempfile.TemporaryDirectory() as folder:
        session = sessions.get(support.LOCAL, {"spark.driver.extraJavaOptions": options})
        rows = session.createDataFrame([(i, float(i)) for i in range(8)], "a int, b double").repartition(2)
        rows = VectorAssembler(inputCols=["b"], outputCol="c").transform(rows)
        rows.write.parquet(f"{folder}/rows")
        session.read.parquet(f"{folder}/rows").filter("a > 3").groupBy("a").count().collect()
        session.sparkContext.parallelize(range(4), 2).barrier().mapPartitions(list).collect()
    if not coming.is_file():
        sys.exit("Java has written no archive; what it said is above")
    coming.rename(support.ARCHIVE)
    sys.stdout.write(f"{support.ARCHIVE}: {support.ARCHIVE.stat().st_size / 1e6:.0f} MB\n")


if __name__ == "__main__":
    main()
