"""What spark-submit runs: ``spark-submit --py-files isthmus.whl submit.py latency CAPTURE --report latency.html``.

The commands of ``isthmus spark``, and ``report``. The master, memory and so on are spark-submit's.
"""

from __future__ import annotations

from isthmus_spark.cli import app, report

if __name__ == "__main__":
    app.command("report")(report)
    app(prog_name="submit.py")
