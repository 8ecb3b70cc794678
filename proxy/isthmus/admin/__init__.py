"""The admin listener: REST under ``/v1``, health and metrics, described at ``/openapi.json``.

*Services* are the parts of the process that it speaks for; they come up one after the other, and what needs a part
that is not there yet answers 503. An *operation* is work that takes longer than a request should: it is started, and
asked for. *Access* says who somebody is and what they may do; the *guard* asks it before anything else is looked at.
"""

from isthmus.admin.app import create_app
from isthmus.admin.models import BrokerAddress, ProcessDescription
from isthmus.admin.server import AdminServer
from isthmus.admin.services import AdminServices, ControlLogPort

__all__ = ("AdminServer", "AdminServices", "BrokerAddress", "ControlLogPort", "ProcessDescription", "create_app")
