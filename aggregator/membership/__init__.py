"""The silos of a federation: invitation, enrolment, withdrawal."""
