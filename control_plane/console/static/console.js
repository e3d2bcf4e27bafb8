// 1. A one-time secret travels in the fragment, which no server sees: put it into its field, then drop it.
document.querySelectorAll("form[data-fragment]").forEach(function (form) {
  if (location.hash.length > 1) {
    form.elements[form.dataset.fragment].value = location.hash.slice(1);
    history.replaceState(null, "", location.pathname);
  }
});
// 2. A live part that has not been refreshed for 10 s says so; it never goes on looking fresh.
document.querySelectorAll("[data-live]").forEach(function (part) {
  var last = Date.now();
  part.addEventListener("htmx:afterOnLoad", function (event) { if (event.detail.xhr.status === 200) { last = Date.now(); } });
  setInterval(function () {
    var stale = Date.now() - last > 10000;
    part.classList.toggle("stale", stale);
    if (stale) { part.setAttribute("data-stale", document.documentElement.lang === "zh-Hans" ? "已过期：与控制平面失去联系" : "Stale: no contact with the control plane"); }
  }, 1000);
});
// 3. Sign-in lost: a fragment that answers 401 sends the reader to the sign-in page.
document.body.addEventListener("htmx:responseError", function (event) {
  if (event.detail.xhr.status === 401) { location.assign("/login"); }
});
// 4. A refresh leaves open what the reader has opened.
document.body.addEventListener("htmx:beforeSwap", function (event) {
  var open = Array.from(event.detail.target.querySelectorAll("details[open][id]"), function (part) { return part.id; });
  event.detail.target.addEventListener("htmx:afterSwap", function () {
    open.forEach(function (id) { var part = document.getElementById(id); if (part) { part.open = true; } });
  }, { once: true });
});
