"""What is known of one signature, and its output as text, JSON, DOT, a trace and an HTML page. No decisions here.

``report.py`` is what is known, ``summary.py`` and ``explanation.py`` what follows from it. It is drawn by ``text.py``
(``explain`` and the command line), ``dump.py`` (JSON), ``dot.py`` (the graph, also as SVG), ``timeline.py`` (a
trace), ``page/`` (HTML, by ``page/assemble.py``) and ``notebook.py``. Pipelines are drawn by ``pipelines.py`` and
``page/pipelines.py``.
"""
