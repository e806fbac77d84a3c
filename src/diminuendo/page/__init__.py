"""The planner page: a form in the browser, a server on this machine that plans, a picture.

`settings` is the form as a value with limits; `answers` turns it into what the page shows,
`exports` into files to go on with; `worker` computes in a process of its own that can be stopped;
`server` speaks HTTP; `document` puts page.html, page.css and page.js into one file. The browser
draws what these computed, and computes nothing about privacy itself.
"""

from diminuendo.page.answers import answer, running
from diminuendo.page.document import live, snapshot
from diminuendo.page.settings import Settings

__all__ = ["Settings", "answer", "live", "running", "snapshot"]
